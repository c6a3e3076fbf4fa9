"""Upper bound of content reuse: the tokens inside any run of `gram` ids that was seen before, at any position."""

from __future__ import annotations

import numpy as np

from irminsul_backend.cache.registry import SINK_TOKENS
from irminsul_backend.chunking import gram_hashes


class GramBound:
    """Remembers the 64-bit hash of every run of `gram` ids. A collision (1 in 2^64 a pair) only raises the bound."""

    def __init__(self, gram: int = 32) -> None:
        """gram: length of the shortest run worth reusing; a power of two."""
        self.gram = gram
        self._known: set[int] = set()

    def count(self, token_ids: np.ndarray, start: int) -> int:
        """Count the tokens of int32 `token_ids` [n] that could be reused after an exact prefix of `start` tokens.

        Like the planner, this excludes the last token and, after a shorter prefix, the first 32 positions.
        """
        hashes = gram_hashes(token_ids, self.gram)
        seen = np.fromiter((h in self._known for h in hashes.tolist()), bool, len(hashes))
        steps = np.zeros(len(token_ids) + 1, np.int32)
        steps[:-1][: len(seen)] += seen
        steps[self.gram :][: len(seen)] -= seen
        covered = np.cumsum(steps[:-1]) > 0
        return int(covered[max(start, SINK_TOKENS) : len(token_ids) - 1].sum())

    def add(self, token_ids: np.ndarray) -> None:
        """Record every run of int32 `token_ids` [n] as seen."""
        self._known.update(gram_hashes(token_ids, self.gram).tolist())
