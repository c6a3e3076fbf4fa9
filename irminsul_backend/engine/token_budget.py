"""How many tokens of prompts a step computes beside the sequences that decode."""

from __future__ import annotations

LEAST_SLICE = 128
"""Least token budget of a step: a smaller one would repeat too much work per step."""
PREFILL_SHARE = 4
"""Prompts get at least one part in so many of a step's budget, however many sequences decode."""


class TokenBudget:
    """While sequences decode, the budget of a step is halved when a step took longer than the target and doubled when
    it took less than half of it, so that a long prompt does not stall decoding."""

    def __init__(self, max_batch_tokens: int, target_s: float) -> None:
        """max_batch_tokens: most tokens in a step. target_s: duration that a step should not exceed, in seconds."""
        self._most = self._slice = max_batch_tokens
        self._target_s = target_s

    def max_decoding(self, prefilling: bool) -> int:
        """Return the most sequences that may decode in a step; if prompts are waiting, their share is left over."""
        return max(1, self._most - max(1, self._slice // PREFILL_SHARE)) if prefilling else self._most

    def prefill(self, decoding: int) -> int:
        """Return the number of prompt tokens beside so many decoding sequences (at most :meth:`max_decoding`)."""
        if not decoding:
            return self._most
        return max(self._slice - decoding, self._slice // PREFILL_SHARE, 1)

    def adapt(self, seconds: float) -> None:
        """Take in the duration of a step in which sequences decoded beside prompts."""
        if seconds > self._target_s:
            self._slice = max(min(LEAST_SLICE, self._most), self._slice // 2)
        elif seconds < self._target_s / 2:
            self._slice = min(self._most, self._slice * 2)
