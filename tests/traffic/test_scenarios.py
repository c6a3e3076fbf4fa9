"""The scenarios: equal to the reference program where it is at hand, and their properties on data made here."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from irminsul_traffic.scenarios import REMINDER, SCENARIOS, apply_scenario
from irminsul_traffic.traces import TraceSession, read_trace

TRACES = Path(__file__).resolve().parents[3] / "shared" / "traces"
needs_traces = pytest.mark.skipif(not (TRACES / "vary.py").exists(), reason=f"{TRACES} is not there")


def random_sessions(count: int, seed: int) -> Iterator[TraceSession]:
    """Sessions of random roles and lengths, with and without a user message, shorter and longer than any limit."""
    rng = random.Random(seed)
    roles = ("system", "tool_schema", "doc", "user", "assistant", "tool")
    for number in range(count):
        turns = []
        for _ in range(rng.randint(1, 6)):
            turns.append(
                tuple(
                    {"role": rng.choice(roles), "content": rng.choice("abc ") * rng.choice((0, 1, 199, 200, 201, 900))}
                    for _ in range(rng.randint(1, 25))
                )
            )
        yield TraceSession(f"made/{'x' * rng.randint(0, 30)}{number}", tuple(turns))


def as_row(session: TraceSession) -> dict[str, Any]:
    return {"session_id": session.session_id, "turns": [{"messages": list(t)} for t in session.turns]}


def reference(scenario: str, sessions: list[TraceSession], folder: Path) -> list[dict[str, Any]]:
    path = folder / "input.jsonl"
    path.write_text("".join(json.dumps(as_row(s), ensure_ascii=False) + "\n" for s in sessions), encoding="utf-8")
    command = [sys.executable, str(TRACES / "vary.py"), scenario, str(path)]
    lines = subprocess.run(command, capture_output=True, check=True, encoding="utf-8").stdout.split("\n")
    return [json.loads(line) for line in lines if line]


@needs_traces
@pytest.mark.parametrize("scenario", SCENARIOS)
class TestAgainstReference:
    def test_made_sessions(self, scenario: str, tmp_path: Path) -> None:
        sessions = list(random_sessions(40, seed=3))
        ours = [as_row(s) for s in apply_scenario(scenario, sessions)]
        assert ours == reference(scenario, sessions, tmp_path)

    @pytest.mark.parametrize("name", ["rag_hotpot", "tau_airline"])
    def test_recorded_sessions(self, scenario: str, name: str, tmp_path: Path) -> None:
        sessions = list(islice(read_trace(TRACES / f"{name}.jsonl.zst"), 3))
        ours = [as_row(s) for s in apply_scenario(scenario, sessions)]
        assert ours == reference(scenario, sessions, tmp_path)


class TestProperties:
    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_deterministic_and_independent_of_what_follows(self, scenario: str) -> None:
        sessions = list(random_sessions(12, seed=8))
        whole = list(apply_scenario(scenario, sessions))
        assert whole == list(apply_scenario(scenario, sessions))
        assert whole[:5] == list(apply_scenario(scenario, sessions[:5]))

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_the_input_is_left_alone(self, scenario: str) -> None:
        sessions = list(random_sessions(5, seed=9))
        before = [as_row(s) for s in random_sessions(5, seed=9)]
        list(apply_scenario(scenario, sessions))
        assert [as_row(s) for s in sessions] == before

    def test_early_differs_each_turn_and_keeps_the_rest(self) -> None:
        sessions = list(random_sessions(6, seed=10))
        headers = set()
        for old, new in zip(sessions, apply_scenario("early", sessions), strict=True):
            for before, after in zip(old.turns, new.turns, strict=True):
                header, _, rest = after[0]["content"].partition("\n")
                assert (rest, after[1:]) == (before[0]["content"], before[1:])
                headers.add(header)
        assert len(headers) == sum(len(s.turns) for s in sessions)

    def test_reorder_only_permutes(self) -> None:
        sessions = list(random_sessions(10, seed=11))
        moved = 0
        for old, new in zip(sessions, apply_scenario("reorder", sessions), strict=True):
            for before, after in zip(old.turns, new.turns, strict=True):
                assert sorted(map(repr, before)) == sorted(map(repr, after))
                moved += before != after
        assert moved > 5

    def test_trim_keeps_head_and_newest_within_half(self) -> None:
        old = [{"role": "system", "content": "s"}, {"role": "user", "content": "task"}]
        history = [{"role": "tool", "content": str(i) * 10} for i in range(10)]
        (session,) = apply_scenario("trim", [TraceSession("a", (tuple(old), tuple(old + history)))])
        short, long = session.turns
        assert list(short) == old
        note = {"role": "user", "content": "[6 earlier messages omitted to fit the context]"}
        assert list(long) == [*old, note, *history[6:]]

    def test_prune_stubs_long_outputs_but_the_last_four(self) -> None:
        user = {"role": "user", "content": "go"}
        results = [{"role": "tool", "content": "r" * n} for n in (300, 200, 201, 301, 302, 303, 304)]
        (session,) = apply_scenario("prune", [TraceSession("a", ((user, *results),))])
        stubs = [{"role": "tool", "content": f"[Tool output pruned - was {n} chars]"} for n in (300, 201)]
        assert list(session.turns[0]) == [user, stubs[0], results[1], stubs[1], *results[3:]]

    def test_reminder_rides_on_the_newest_user_or_tool_message(self) -> None:
        turn = (
            {"role": "user", "content": "u"},
            {"role": "tool", "content": "t"},
            {"role": "assistant", "content": "a"},
        )
        (session,) = apply_scenario("reminder", [TraceSession("a", (turn,))])
        assert [m["content"] for m in session.turns[0]] == ["u", f"t\n{REMINDER}", "a"]

    def test_unknown_scenario(self) -> None:
        with pytest.raises(KeyError, match="sideways"):
            apply_scenario("sideways", [])
