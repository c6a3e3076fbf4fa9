"""How much any matcher could reuse: tokens inside some run of `gram` ids that was seen before, anywhere."""

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
        """Tokens of int32 `token_ids` [n] that could be reused behind an exact prefix of `start`.

        Like the planner it leaves out the last token and, behind a prefix that is shorter, the first 32 positions.
        """
        hashes = gram_hashes(token_ids, self.gram)
        seen = np.fromiter((h in self._known for h in hashes.tolist()), bool, len(hashes))
        steps = np.zeros(len(token_ids) + 1, np.int32)
        steps[:-1][: len(seen)] += seen
        steps[self.gram :][: len(seen)] -= seen
        covered = np.cumsum(steps[:-1]) > 0
        return int(covered[max(start, SINK_TOKENS) : len(token_ids) - 1].sum())

    def add(self, token_ids: np.ndarray) -> None:
        """Everything in int32 `token_ids` is known from now on."""
        self._known.update(gram_hashes(token_ids, self.gram).tolist())
