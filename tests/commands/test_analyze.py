"""`irminsul analyze` as people run it: in a process of its own, from files to tables, JSON and a report."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from irminsul_traffic.synthetic import synthetic_sessions

from irminsul_backend.chunking import PRESETS
from irminsul_backend.commands.main import main

NO_TORCH = """
import sys
sys.modules["torch"] = sys.modules["triton"] = None  # importing them raises ImportError
from irminsul_backend.commands.main import main
sys.exit(main(sys.argv[1:]))
"""
SECRET = "zanzibar"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "made.jsonl"
    rows = [
        {"session_id": s.session_id, "turns": [{"messages": list(turn)} for turn in s.turns]}
        for s in synthetic_sessions(4, turns=4)
    ]
    rows[0]["turns"][0]["messages"][0]["content"] += SECRET
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{broken\n")
    return path


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps({"messages": list(s.turns[-1])}) + "\n" for s in synthetic_sessions(3)))
    return path


def results(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["results"]


def test_runs_without_torch(trace: Path, log: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "out.json", tmp_path / "report.html"
    command = ["analyze", str(trace), str(log), "--scenario", "all", "--compare", "--capacity", "20k,1M"]
    command += ["--model", "deepseek-v3", "--json", str(out), "--report", str(report)]
    run = subprocess.run([sys.executable, "-c", NO_TORCH, *command], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    rows = results(out)
    assert [(r["file"], r["scenario"], r["preset"]) for r in rows] == [
        (str(path), "all", preset) for path in (trace, log) for preset in PRESETS
    ]
    for row in rows:
        assert row["exact"] + row["content"] + row["computed"] == row["tokens"] > 0
        assert row["exact_blocks"] <= row["exact"] and row["segments"] >= 0 and row["bound"] >= 0
        assert row["prompts"] == (16 if row["file"] == str(trace) else 3)
        assert [p["capacity"] for p in row["capacities"]] == [20_000, 1_000_000]
        assert row["estimate"]["flops"] > row["estimate"]["content_flops"] > 0
    assert rows[0]["causes"][0]["name"] == "header" and rows[0]["causes"][0]["advice"]
    assert len(rows[0]["problems"]) == 1 and "line 5" in rows[0]["problems"][0]
    for shown in ("made.jsonl", "requests.jsonl", "mean of files", "header", "1,000,000", "bound", "line 5", "PFLOP"):
        assert shown in run.stdout
    assert SECRET not in run.stdout + report.read_text() + out.read_text()


def test_every_scenario_and_several_presets(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    assert main(["analyze", str(trace), "--scenario", "every", "--preset", "paper,grams", "--json", str(out)]) == 0
    rows = results(out)
    names = ["asis", "early", "reorder", "trim", "prune", "reminder", "all"]
    assert [(r["scenario"], r["preset"]) for r in rows] == [(s, p) for s in names for p in ("paper", "grams")]
    assert "bound" not in rows[0] and rows[0]["capacities"] == []


def test_text_is_shown_on_request(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(trace), "--scenario", "early"]) == 0
    assert "request_id" not in capsys.readouterr().out
    assert main(["analyze", str(trace), "--scenario", "early", "--show-text"]) == 0
    assert "request_id" in "".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--preset", "papre"], "'papre' is unknown; known are paper"),
        (["--scenario", "asis,foo"], "'foo' is unknown"),
        (["--capacity", "12q"], "'12q' is not a number of tokens"),
        (["--block", "0"], "'0' is not a number of tokens"),
    ],
)
def test_wrong_flags(trace: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["analyze", str(trace), *options])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--tokenizer", "/nowhere"], "nowhere"),
        (["--model", "gpt-17"], "known are"),
        (["--watts", "-1", "--model", "kimi-k2"], "must be positive"),
        (["--json", "/nowhere/x.json"], "/nowhere/x.json cannot be written"),
        (["--report", "/nowhere/x.html"], "/nowhere/x.html cannot be written"),
        (["--report", ""], "'' cannot be written"),
        (["--json", "/tmp/same.out", "--report", "/tmp/same.out"], "--json and --report both name '/tmp/same.out'"),
        (["--model", "deepseek-v3", "--watts", "inf"], "both must be positive and finite"),
        (["--model", "deepseek-v3", "--flops-per-second", "nan"], "both must be positive and finite"),
    ],
)
def test_errors_are_one_line(trace: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(trace), *options]) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("irminsul: ")]
    assert said in line


def test_an_input_is_never_overwritten(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = trace.read_bytes()
    for name in ("--json", "--report"):
        assert main(["analyze", str(trace), name, str(trace)]) == 1
        assert "would be overwritten" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_what_may_be_text_is_quoted_short_and_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half surrogate pairs, control characters and long names cost their line only; a byte order mark costs nothing."""
    good = {"messages": [{"role": "user", "content": "hi"}]}
    lines = [
        good,
        {"messages": [{"role": "\ud800", "content": "hi"}]},
        {"session_id": "\udc00", **good},
        {"\x1b[31mred" + "x" * 400: 1},
        {"session_id": {"note": "CANARY"}, "turns": [good]},
        {"messages": [{"role": "r" * 400, "content": "pair \U0001f642 is fine"}]},
    ]
    path, out = tmp_path / "log.jsonl", tmp_path / "out.json"
    path.write_text("\ufeff" + "\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    assert main(["analyze", str(path), "--json", str(out)]) == 0
    problems = json.loads(out.read_text())["results"][0]["problems"]
    assert [p.split("line ")[1].split(":")[0] for p in problems] == ["2", "3", "4", "5", "6"]
    assert "half of a surrogate pair" in problems[0] and "half of a surrogate pair" in problems[1]
    assert not any("CANARY" in p or "\x1b" in p or len(p) > 200 + len(str(path)) for p in problems)
    assert json.loads(out.read_text())["results"][0]["prompts"] == 2


def test_a_damaged_gz_keeps_what_came_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "log.jsonl.gz", tmp_path / "out.json"
    line = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode() + b"\n"
    path.write_bytes(gzip.compress(line * 3) + b"garbage here")
    assert main(["analyze", str(path), "--json", str(out)]) == 0
    result = json.loads(out.read_text())["results"][0]
    assert result["prompts"] == 3 and "damaged" in result["problems"][0]


def test_a_file_that_is_missing_or_of_no_known_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "table.csv"
    other.write_text("a,b\n")
    for path in (tmp_path / "absent", other):
        assert main(["analyze", str(path)]) == 1
        assert f"irminsul: {path} " in capsys.readouterr().err
    assert main(["analyze", str(other)]) == 1
    assert "expected one JSON object a line" in capsys.readouterr().err


def test_help_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["analyze", "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    for word in (
        "session_id",
        "OpenAI",
        "Anthropic",
        ".txt",
        "paper+s1",
        "every",
        "200k",
        "an assumption",
        "examples:",
    ):
        assert word in text
