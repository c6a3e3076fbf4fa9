"""The benchmark of tokenising runs and says what it measured; what it finds depends on the machine."""

from __future__ import annotations

from irminsul_backend.benchmarks.tokenizing import changed_message
from irminsul_backend.config import DEMO_MODEL


def test_both_kinds_are_measured() -> None:
    figures = changed_message(DEMO_MODEL, tokens=4000, repeats=1)
    for kind in ("tokenizer_json", "tiktoken_model"):
        share = figures[f"{kind}_changed_ms"] / figures[f"{kind}_cold_ms"]
        assert abs(figures[f"{kind}_share"] - share) < 0.05
