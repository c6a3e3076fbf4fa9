"""Each cause, with small messages made here and with the scenarios that disturb prompts as harnesses do."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from irminsul_traffic.scenarios import apply_scenario
from irminsul_traffic.synthetic import synthetic_sessions

from irminsul_backend.analysis.causes import CAUSES, Part, classify, common_beginning, likeness, parts_of

LONG = "All of this stays as it is from one request to the next one. " * 4
HEAD: list[Part] = [
    ("system", LONG),
    ("tool_schema", "tool A"),
    ("tool_schema", "tool B"),
    ("doc", "d1"),
    ("doc", "d2"),
]
TALK: list[Part] = [
    ("user", "please do it"),
    ("assistant", "call 1"),
    ("tool", "result one " * 30),
    ("assistant", "call 2"),
    ("tool", "result two " * 30),
]
NEW: list[Part] = [("assistant", "call 3"), ("tool", "result three")]
BEFORE = HEAD + TALK
CALM: Part = ("system", "REMINDER: stay calm")


def changed(at: int, text: str) -> list[Part]:
    parts = BEFORE + NEW
    parts[at] = (parts[at][0], text)
    return parts


@pytest.mark.parametrize(
    ("former", "current", "cause"),
    [
        (BEFORE, BEFORE + NEW, "new_text"),
        (BEFORE, BEFORE, "new_text"),
        ([("user", "Question. So far:")], [("user", "Question. So far: I must search")], "new_text"),
        ([("system", f"[10:05:33] {LONG}"), *TALK], [("system", f"[10:05:39] {LONG}"), *TALK, *NEW], "header"),
        ([("system", f"id=9f8a {LONG}"), *TALK], [("system", f"id=0c11d2e {LONG}"), *TALK, *NEW], "header"),
        ([("system", f"{LONG} Now: Mon 3 May"), *TALK], [("system", f"{LONG} Now: Tue 4 May"), *TALK], "header"),
        (
            [("system", f"run brave-otter\n{LONG}"), *TALK],
            [("system", f"run sly-fox\n{LONG}"), *TALK, *NEW],
            "header",
        ),
        ([("user", f"Today is 2026-11-29. {LONG}")], [("user", f"Today is 2026-11-30. {LONG}")], "header"),
        (BEFORE, [HEAD[0], HEAD[2], HEAD[1], *HEAD[3:], *TALK, *NEW], "tool_order"),
        (BEFORE, [*HEAD[:2], ("tool_schema", "tool C"), *HEAD[2:], *TALK], "tool_set"),
        (BEFORE, [*HEAD[:2], *HEAD[3:], *TALK], "tool_set"),
        (BEFORE, [*HEAD[:3], HEAD[4], HEAD[3], *TALK], "document_order"),
        (BEFORE, [*HEAD[:3], ("doc", "d0"), *HEAD[3:], *TALK], "document_set"),
        (BEFORE, [*HEAD, TALK[0], TALK[1], TALK[4], TALK[3], TALK[2], *NEW], "document_order"),
        (BEFORE, changed(7, "[pruned]"), "pruned_output"),
        (BEFORE, changed(9, "[pruned]"), "pruned_output"),
        (BEFORE, [*HEAD, TALK[0], *TALK[3:], *NEW], "trimmed_history"),
        (BEFORE, [*HEAD, TALK[0], ("user", "[2 omitted]"), *TALK[3:], *NEW], "trimmed_history"),
        (BEFORE, [*HEAD, TALK[0], ("user", "[4 omitted]"), *NEW], "trimmed_history"),
        (BEFORE, BEFORE[:-1], "trimmed_history"),
        (
            [*HEAD, TALK[0], ("user", "[2 omitted]"), *TALK[3:], *NEW],
            [*HEAD, TALK[0], ("user", "[4 omitted]"), *NEW, ("assistant", "call 4")],
            "trimmed_history",
        ),
        (
            [*BEFORE[:-1], ("tool", TALK[4][1] + "\nREMINDER: stay calm")],
            [*BEFORE, NEW[0], ("tool", "result three\nREMINDER: stay calm")],
            "moved_reminder",
        ),
        (
            [*BEFORE[:-1], ("tool", TALK[4][1] + "\n<now>10:05</now>")],
            [*BEFORE, NEW[0], ("tool", "result three\n<now>10:06</now>")],
            "moved_reminder",
        ),
        ([*BEFORE, ("user", "REMINDER")], [*BEFORE, *NEW, ("user", "REMINDER")], "moved_reminder"),
        (
            [("user", "hi\nREMINDER")],
            [("user", "hi"), ("assistant", "yes"), ("user", "more\nREMINDER")],
            "moved_reminder",
        ),
        ([*BEFORE, CALM], [*BEFORE, *NEW, CALM], "moved_reminder"),
        ([*BEFORE, ("system", "it is 10:05")], [*BEFORE, *NEW, ("system", "it is 10:06")], "moved_reminder"),
        ([HEAD[0], CALM, TALK[0]], [HEAD[0], TALK[0], TALK[1], CALM, ("user", "next")], "moved_reminder"),
        (
            [HEAD[0], TALK[0], TALK[1], CALM, ("user", "next"), *TALK[3:], *NEW],
            [HEAD[0], TALK[0], TALK[1], ("user", "next"), *TALK[3:], *NEW, CALM, ("user", "then")],
            "moved_reminder",
        ),
        ([*BEFORE, CALM], [*BEFORE, ("system", "be quick"), *NEW], "rewritten_message"),
        ([HEAD[0], TALK[0]], [CALM, HEAD[0], TALK[0]], "rewritten_message"),
        (
            [*TALK[:2], ("user", "result one " * 30), *NEW],
            [*TALK[:2], ("user", "[pruned]"), *NEW, ("user", "next")],
            "pruned_output",
        ),
        ([("user", "Sum up: " + LONG)], [("user", "Sum up: this")], "rewritten_message"),
        ([HEAD[0], ("user", "Sum up: " + LONG)], [HEAD[0], ("user", "Sum up: this")], "rewritten_message"),
        (
            [HEAD[0], *TALK[:2], ("user", "Sum up: " + LONG)],
            [HEAD[0], *TALK[:2], ("user", "Sum up: this")],
            "rewritten_message",
        ),
        (BEFORE, changed(6, "act"), "rewritten_message"),
        (BEFORE, changed(6, "another call, and a longer one than before"), "rewritten_message"),
        ([("system", "one agent " * 99), *TALK], [("system", "the other " * 80), *TALK], "rewritten_message"),
        (BEFORE, [*HEAD, TALK[0], ("user", "put in between"), *TALK[1:], *NEW], "rewritten_message"),
    ],
)
def test_causes(former: list[Part], current: list[Part], cause: str) -> None:
    assert classify(former, current) == cause
    assert cause in CAUSES


@pytest.mark.parametrize(
    ("scenario", "expected"),
    [
        ("asis", {"new_text"}),
        ("early", {"header"}),
        ("reorder", {"tool_order"}),
        ("prune", {"pruned_output", "new_text"}),
        ("reminder", {"moved_reminder"}),
        ("trim", {"trimmed_history", "new_text"}),
        ("all", {"header"}),
    ],
)
def test_scenarios(scenario: str, expected: set[str]) -> None:
    found: Counter[str] = Counter()
    for session in apply_scenario(scenario, synthetic_sessions(4, turns=12, documents=0, sentences=9)):
        turns = [parts_of(turn) for turn in session.turns]
        found.update(classify(a, b) for a, b in pairwise(turns))
    assert set(found) == expected, found
    assert found.most_common(1)[0][1] > 20


def test_reordered_documents() -> None:
    sessions = apply_scenario("reorder", synthetic_sessions(3, turns=6, tools=0, documents=6))
    turns = [parts_of(turn) for session in sessions for turn in session.turns]
    assert {classify(a, b) for a, b in pairwise(turns[:6])} == {"document_order"}


def test_every_pair_of_prompts_has_a_cause() -> None:
    """No order of messages makes the classification fail."""
    turns = [parts_of(t) for s in synthetic_sessions(3, turns=4) for t in s.turns]
    turns += [[], [("user", "")], [("user", ""), ("user", "")], list(reversed(turns[0]))]
    for a in turns:
        for b in turns:
            assert classify(a, b) in CAUSES


def test_likeness_prefers_the_common_beginning() -> None:
    assert likeness(BEFORE, BEFORE + NEW) > likeness([("system", "x"), *BEFORE[1:]], BEFORE + NEW)
    assert likeness([("system", "x"), *BEFORE[1:]], BEFORE) > likeness([("system", "x")], BEFORE)


@pytest.mark.parametrize(("a", "b", "n"), [("", "a", 0), ("abc", "abd", 2), ("abc", "abc", 3), ("xbc", "abc", 0)])
def test_common_beginning(a: str, b: str, n: int) -> None:
    assert common_beginning(a, b) == n
