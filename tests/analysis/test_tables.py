"""Tables for a terminal: causes with what has none, and advice only for what cost something."""

from __future__ import annotations

import pytest
from rich.console import Console, RenderableType

from irminsul_backend.analysis.causes import CAUSES
from irminsul_backend.analysis.results import Break, Cause, PromptResult, ReplayResult
from irminsul_backend.analysis.tables import NO_CAUSE, advice_lines, causes_table


@pytest.fixture
def result() -> ReplayResult:
    result = ReplayResult("log.jsonl", "asis", "default", sessions=2)
    for turn, content in ((0, 1_700), (1, 4_000), (0, 600), (1, 0)):
        result.prompts.append(PromptResult("s", turn, 10_000, 0, 0, content, 10_000 - content, ()))
    result.breaks = [Break("s", 1, 30, "header", 4_000), Break("s", 1, 40, "tool_set", 0)]
    result.causes = [Cause(b.cause, 1, b.lost, CAUSES[b.cause]) for b in result.breaks]
    return result


def printed(table: RenderableType) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def test_tokens_lost_and_those_without_cause_add_up_to_content(result: ReplayResult) -> None:
    text = printed(causes_table([result, result]))
    rows = [line.split() for line in text.splitlines() if line.split()[:2] == ["asis", "default"]]
    assert sum(int(row[-3].replace(",", "")) for row in rows) == 2 * result.content
    assert sum(int(row[-4]) for row in rows) == 2 * len(result.prompts)
    assert rows[-1][2:] == [*NO_CAUSE.split(), "4", "4,600", "5.8", "-"]
    assert f"{NO_CAUSE}: what content reuse finds for first prompts" in " ".join(text.split())


def test_advice_only_for_what_cost_something(result: ReplayResult) -> None:
    text = printed(advice_lines([result]))
    assert CAUSES["header"] in " ".join(text.split())
    assert "tool_set" not in text
