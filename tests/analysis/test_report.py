"""The HTML report: what it holds adds up with the results, leaks nothing, and is drawn by a real browser."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_backend.analysis.report import write_report
from irminsul_backend.analysis.report_data import (
    MAX_BINS,
    PROMPT_COST,
    bin_prompts,
    choose_prompts,
    short_names,
    summarise,
)
from irminsul_backend.analysis.results import Break, CapacityPoint, Cause, PromptResult, ReplayResult

EVIL = '</script><img src=x onerror="document.body.dataset.owned=1"><b>'
SIZE_LIMIT = 5_000_000
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
PROBE = """<script>
function probe() {
  const seen = [];
  const look = () => seen.push([
    document.documentElement.clientWidth, document.documentElement.scrollWidth,
    document.querySelectorAll("#time svg path").length,
    document.querySelectorAll("#map rect").length,
  ]);
  look();
  const count = document.querySelectorAll("select").length;
  for (let k = 0; k < count; k++) {
    for (let i = 0; i < document.querySelectorAll("select")[k].options.length; i++) {
      const box = document.querySelectorAll("select")[k];
      box.selectedIndex = i;
      box.dispatchEvent(new Event("change"));
      look();
    }
  }
  for (let i = 0; i < document.querySelectorAll("button").length; i++) {
    document.querySelectorAll("button")[i].click();
    look();
  }
  for (const id of ["timeline", "map"]) {
    for (const key of ["ArrowRight", "ArrowRight", "End", "Home", "Enter"]) {
      document.getElementById(id).dispatchEvent(new KeyboardEvent("keydown", { key }));
      look();
    }
  }
  document.querySelectorAll("details").forEach((d) => (d.open = true));
  document.body.dataset.spoken = document.querySelector("[aria-live]").textContent;
  document.body.dataset.probe = JSON.stringify(seen);
}
probe();
</script>"""


def make_prompt(rng: random.Random, session: str, turn: int, most: int = 12) -> PromptResult:
    """A prompt of random segments that do not overlap; the first may be an exact prefix."""
    segments: list[tuple[int, int, int, bool]] = []
    at = 0
    for k in range(rng.randint(0, most)):
        exact = k == 0 and rng.random() < 0.5
        start = 0 if exact else at + rng.randint(0, 40)
        length = rng.randint(1, 300)
        segments.append((start, length, 0 if exact else start - rng.randint(0, 6000), exact))
        at = start + length
    tokens = at + rng.randint(1, 50)
    exact_tokens = sum(s[1] for s in segments if s[3])
    content = sum(s[1] for s in segments if not s[3])
    computed = tokens - exact_tokens - content
    blocks = exact_tokens // 16 * 16
    return PromptResult(session, turn, tokens, exact_tokens, blocks, content, computed, tuple(segments))


def make_result(
    file: str = "log.jsonl", scenario: str = "asis", preset: str = "default", *, prompts: int = 40, seed: int = 1,
    session: str = "session-{}", text: str = "x", most: int = 12,
) -> ReplayResult:  # fmt: skip
    rng = random.Random(f"{file} {scenario} {preset} {seed}")
    result = ReplayResult(file, scenario, preset, sessions=-(-prompts // 5), seconds=0.25)
    for i in range(prompts):
        p = make_prompt(rng, session.format(i // 5), i % 5, most)
        result.prompts.append(p)
        cause = rng.choice(["header", "tool_order"])
        result.breaks.append(Break(p.session, p.turn, p.exact, cause, p.content, text, text, text))
    for name in ("header", "tool_order"):
        mine = [b for b in result.breaks if b.cause == name]
        result.causes.append(Cause(name, len(mine), sum(b.lost for b in mine), f"Advice on {name}."))
    result.bound = result.content + 7
    result.capacities = [
        CapacityPoint(
            n, result.exact // d, result.content // d, result.tokens - result.exact // d - result.content // d
        )
        for n, d in ((400_000, 1), (100_000, 2))
    ]
    result.problems = [f"{file}:{n}: not JSON" for n in (3, 17)]
    return result


class Page(HTMLParser):
    """Title, scripts and every address that a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.tags: list[str] = []
        self.addresses: list[str | None] = []
        self.title = ""
        self._open = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self._open = tag
        self.addresses += [value for name, value in attrs if name in ("src", "href", "srcset", "action", "data")]
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_data(self, data: str) -> None:
        if self._open == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._open == "title":
            self.title += data

    def handle_endtag(self, tag: str) -> None:
        self._open = ""

    @property
    def data(self) -> Any:
        return json.loads(next(text for attrs, text in self.scripts if attrs.get("id") == "data"))


def write(results: list[ReplayResult], folder: Path, **options: Any) -> tuple[str, Page]:
    path = folder / "report.html"
    write_report(results, path, **options)
    text = path.read_text(encoding="utf-8")
    return text, Page(text)


class TestContents:
    def test_stands_alone(self, tmp_path: Path) -> None:
        text, page = write([make_result()], tmp_path, title="Ours & theirs <1>")
        assert page.title == "Ours & theirs <1>"
        assert page.addresses == ["data:,"]
        assert "url(" not in text.replace("url(#hatch)", "") and "@import" not in text
        assert text.count("default-src 'none'") == 1

    def test_adds_up(self, tmp_path: Path) -> None:
        results = [make_result(preset=p, scenario=s, prompts=70) for p in ("default", "paper") for s in ("asis", "all")]
        _, page = write(results, tmp_path)
        for shown, result in zip(page.data["results"], results, strict=True):
            assert (shown["scenario"], shown["preset"]) == (result.scenario, result.preset)
            totals = [result.tokens, result.exact, result.content, result.computed]
            assert [shown[k] for k in ("tokens", "exact", "content", "computed")] == totals
            assert [sum(b[k] for b in shown["bins"]) for k in range(5)] == [len(result.prompts), *totals]
            assert (shown["segments"], shown["bound"]) == (result.segments, result.bound)
            assert [c["lost"] for c in shown["causes"]] == sorted((c.lost for c in result.causes), reverse=True)
            assert [c[0] for c in shown["capacities"]] == [100_000, 400_000]
            assert all(sum(c[1:]) == result.tokens for c in shown["capacities"])
            assert len(shown["kept"]) == len(result.prompts)
            for p in shown["kept"]:
                prompt = result.prompts[p["index"]]
                flat = p["segments"]
                assert [tuple(flat[i : i + 4]) for i in range(0, len(flat), 4)] == list(prompt.segments)
                assert sum(flat[1::4]) == p["exact"] + p["content"] == p["tokens"] - p["computed"]

    def test_problems_of_a_file_come_once(self, tmp_path: Path) -> None:
        _, page = write([make_result(preset=p) for p in ("default", "paper")], tmp_path)
        assert page.data["problems"] == [
            {"file": "log.jsonl", "count": 2, "lines": ["log.jsonl:3: not JSON", "log.jsonl:17: not JSON"]}
        ]

    def test_refuses_nothing(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="at least one result"):
            write_report([], tmp_path / "report.html")

    def test_same_results_same_bytes(self, tmp_path: Path) -> None:
        assert write([make_result()], tmp_path)[0] == write([make_result()], tmp_path)[0]


class TestText:
    def test_is_left_out_unless_asked_for(self, tmp_path: Path) -> None:
        result = make_result(session="canary-session-{}", text="canary-text")
        assert "canary" not in write([result], tmp_path)[0]
        shown = write([result], tmp_path, show_text=True)[0]
        assert "canary-session-1" in shown and "canary-text" in shown

    def test_cannot_leave_its_place(self, tmp_path: Path) -> None:
        result = make_result(file=EVIL, scenario=EVIL, preset=EVIL, session=EVIL + "{}", text=EVIL)
        result.problems = [EVIL]
        text, page = write([result], tmp_path, show_text=True, title=EVIL)
        assert "<b>" not in text and "<img" not in text
        assert len(page.scripts) == 2 and page.title == EVIL
        assert page.data["results"][0]["preset"] == EVIL

    def test_half_a_character_is_written(self, tmp_path: Path) -> None:
        _, page = write([make_result(text="cut \ud83d", session="\ud83d{}")], tmp_path, show_text=True)
        assert page.data["results"][0]["causes"][0]["examples"][0]["was"] == "cut ?"


class TestBounds:
    def test_many_results_with_much_text(self, tmp_path: Path) -> None:
        results = [
            make_result(
                f"{file}.jsonl", scenario, preset, prompts=60, most=60, text="語" * 5000, session="語" * 500 + "{}"
            )
            for file in "abcd"
            for scenario in ("asis", "early", "all")
            for preset in ("paper", "paper+s1", "paper+extension", "default", "grams")
        ]
        for r in results:
            r.problems = [f"line {n}: " + "bad " * 500 for n in range(500)]
        write_report(results, tmp_path / "report.html", show_text=True)
        assert (tmp_path / "report.html").stat().st_size < SIZE_LIMIT

    def test_thousands_of_prompts(self, tmp_path: Path) -> None:
        result = make_result(prompts=6000, most=60)
        text, page = write([result], tmp_path)
        shown = page.data["results"][0]
        assert len(text.encode()) < SIZE_LIMIT
        assert len(shown["bins"]) <= MAX_BINS and sum(b[0] for b in shown["bins"]) == 6000
        assert 100 < len(shown["kept"]) < 6000
        largest = max(range(6000), key=lambda k: result.prompts[k].tokens)
        busiest = max(range(6000), key=lambda k: len(result.prompts[k].segments))
        assert {largest, busiest} <= {p["index"] for p in shown["kept"]}

    @given(st.lists(st.lists(st.integers(0, 30), max_size=40), max_size=6), st.integers(0, 900))
    @settings(max_examples=100, deadline=None)
    def test_sample_keeps_to_its_budget(self, sizes: list[list[int]], budget: int) -> None:
        lists = [
            [
                PromptResult("s", i, n + 1, 0, 0, n, 1, tuple((k, 1, 0, False) for k in range(n)))
                for i, n in enumerate(part)
            ]
            for part in sizes
        ]
        kept = choose_prompts(lists, budget)
        costs = [[len(p.segments) + PROMPT_COST for p in part] for part in lists]
        assert sum(c[k] for c, indices in zip(costs, kept, strict=True) for k in indices) <= budget
        for indices, part in zip(kept, costs, strict=True):
            assert indices == sorted(set(indices))
            if sum(part) <= budget // len(lists):
                assert indices == list(range(len(part)))

    @given(st.integers(0, 400), st.integers(1, 50))
    def test_bins(self, count: int, most: int) -> None:
        prompts = [PromptResult("s", i, i + 1, 0, 0, i, 1, ()) for i in range(count)]
        bins = bin_prompts(prompts, most)
        assert len(bins) <= most and all(b[0] == bins[0][0] for b in bins[:-1])
        assert [sum(b[k] for b in bins) for k in (0, 1)] == [count, sum(p.tokens for p in prompts)]

    def test_file_names_are_short_and_differ(self) -> None:
        assert short_names(["/a/b/x.jsonl", "/a/c/x.jsonl", "/q/y.gz"]) == {
            "/a/b/x.jsonl": "b/x.jsonl",
            "/a/c/x.jsonl": "c/x.jsonl",
            "/q/y.gz": "y.gz",
        }
        assert short_names(["x", "a/x"]) == {"x": "x", "a/x": "a/x"}

    def test_a_file_without_prompts(self) -> None:
        shown = summarise([ReplayResult("empty.jsonl", "asis", "default")], show_text=False)["results"][0]
        assert (shown["bins"], shown["kept"], shown["tokens"]) == ([], [], 0)


@pytest.fixture(scope="session")
def browser() -> str:
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser on PATH; any of {', '.join(BROWSERS)} will do (Debian: apt-get install chromium)")
    return path


def load(browser: str, text: str, folder: Path, width: int) -> str:
    """The document after its script has run, `width` pixels wide: in a frame, for windows have a least width."""
    page = folder / "framed.html"
    show = "document.body.textContent = document.querySelector('iframe').contentDocument.documentElement.outerHTML"
    page.write_text(
        f'<meta charset="utf-8"><body onload="{show}"><iframe style="width:{width}px;height:900px;border:0"'
        f' srcdoc="{escape(text)}"></iframe></body>',
        encoding="utf-8",
    )
    quiet = "--disable-quic --no-first-run --disable-background-networking --disable-component-update --disable-sync"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", *quiet.split(), "--window-size=1700,1000"]
    command += [f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return unescape(done.stdout.decode())


class TestBrowser:
    @pytest.mark.parametrize("width", [400, 1600])
    def test_draws_every_choice(self, browser: str, tmp_path: Path, width: int) -> None:
        results = [
            make_result(f"{file}.jsonl", scenario, preset, session=EVIL + "{}", text=EVIL, prompts=25)
            for file in ("one", "two")
            for scenario in ("asis", "all")
            for preset in ("default", "paper")
        ]
        del results[-1]  # a combination that was not replayed
        text, _ = write(results, tmp_path, show_text=True)
        dom = load(browser, text.replace("</body>", PROBE + "</body>"), tmp_path, width)
        body = re.findall(r"<body[^>]*data-[^>]*>", dom)[0]
        assert 'data-ready="yes"' in body and "data-error" not in body and "data-owned" not in body
        assert re.search(r'data-spoken="[^"]*token', body), "arrow keys read nothing"
        seen = json.loads(re.findall(r'data-probe="([^"]*)"', body)[0])
        assert len(seen) > 30
        for visible, needed, areas, rectangles in seen:
            assert width - 20 <= visible <= width and needed <= visible and areas == 3 and rectangles > 1
        for section in ("summary", "time", "prompt", "causes", "presets", "capacity", "problems"):
            assert f'<section id="{section}"' in dom

    def test_draws_a_file_without_prompts(self, browser: str, tmp_path: Path) -> None:
        text, _ = write([ReplayResult("empty.jsonl", "asis", "default")], tmp_path)
        dom = load(browser, text, tmp_path, 800)
        assert 'data-ready="yes"' in dom and "data-error=" not in dom
        assert "There are no prompts" in dom

    def test_says_what_went_wrong(self, browser: str, tmp_path: Path) -> None:
        text, _ = write([make_result()], tmp_path)
        dom = load(browser, text.replace('"bins":[[', '"bins":[null,['), tmp_path, 800)
        assert "This page could not be drawn" in dom and 'data-ready="yes"' not in dom
