"""The demo's prompts change the way it says, and `irminsul demo` runs against a real server."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from irminsul_backend.commands.demo import TURNS, agent_session


def test_every_turn_changes_header_order_and_old_results() -> None:
    questions, prompts = agent_session()
    assert len(questions) == len(prompts) == TURNS == 6
    assert [p[-1]["content"] for p in prompts] == [question.text for question in questions]
    assert {question.hops for question in questions} == {1, 2}
    headers = [p[0]["content"].splitlines()[0] for p in prompts]
    assert len(set(headers)) == 6 and all(h.startswith("x-agent-meta: request_id=") for h in headers)
    documents = [tuple(m["content"] for m in p if m["role"] == "doc") for p in prompts]
    assert len({frozenset(d) for d in documents}) == 1 and len(set(documents)) > 3, "the same ones in another order"
    assert any("pruned" in m["content"] for m in prompts[-1]), "an old result was cut"
    assert not any("pruned" in m["content"] for m in prompts[0])


@pytest.mark.server
def test_the_demo_runs() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "irminsul_backend.commands.main", "demo"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "COLUMNS": "120"},
    )
    assert run.returncode == 0, run.stderr
    rows = [line.split("│") for line in run.stdout.splitlines() if line.startswith("│")]
    assert len(rows) == 2 * TURNS
    tokens, answers = rows[:TURNS], rows[TURNS:]
    for row in tokens:
        prompt, exact, shifted, computed = (int(cell.replace(",", "")) for cell in row[2:6])
        assert exact + shifted + computed == prompt
    reused = [int(row[4].replace(",", "")) / int(row[2].replace(",", "")) for row in tokens]
    assert all(share > 0.7 for share in reused[1:]), "nearly all is reused from the second turn on"
    right = [row[4].strip() == "right" for row in answers]
    assert sum(right) >= TURNS - 1, "without reuse"
    assert "Where to go next" in run.stdout
