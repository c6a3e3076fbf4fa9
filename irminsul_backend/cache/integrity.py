"""Checks of the cache's invariants: one that looks at everything, and one that looks at a little each time.

Reference counts contradict the sequences only as a whole, and the cache changes between two calls. So a pass counts
the holders of each slot sequence by sequence, is told of every change to what it has counted, and then compares.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from irminsul_backend.cache.cached_sequence import CachedSequence
from irminsul_backend.cache.interfaces import Index, Pool

WALKED_SLOTS, COMPARED_SLOTS = 1 << 13, 1 << 18
"""Most slots that one call counts, or compares: about a millisecond."""
SEQUENCES_A_CALL = 256
"""Most sequences that one call ends, since each costs something however short it is."""


def check_rows(pool: Pool, sequence: CachedSequence, start: int, end: int) -> None:
    """Raise AssertionError if the slots of written positions in [start, end) are free or less exact than they claim."""
    end = min(end, sequence.length)
    slots = sequence.slots[start:end]
    assert (pool.refs[slots] > 0).all(), "a sequence names a free slot"
    computed_here = pool.base[slots] == np.arange(start, start + len(slots))
    wrong = (sequence.generation[start:end] == 0) & (~computed_here | (pool.generation[slots] > 0))
    assert not wrong.any(), "a row that is not exact here has generation 0"


class IntegrityPass:
    """Passes over all sequences and slots, a bounded part each call, while the cache goes on changing.

    A contradiction that stays is found within two passes: one may have looked there already. A pass takes
    slots of sequences / WALKED_SLOTS + sequences / SEQUENCES_A_CALL + capacity / COMPARED_SLOTS calls, and few more.
    """

    def __init__(self, pool: Pool, registry: Index) -> None:
        self._pool, self._registry = pool, registry
        self._counted: dict[CachedSequence, int] = {}  # how many of a sequence's slots are in the counts
        self._pending: list[CachedSequence] = []
        self._counts = np.zeros(0, np.int32)
        self._compared = pool.capacity  # slots of the counts that were compared; all of them: no pass is going on
        self._walking = False

    def added(self, sequence: CachedSequence) -> None:
        """Be told that a sequence was admitted."""
        if self._walking:
            self._pending.append(sequence)
        elif self._compared < self._pool.capacity:
            self._count(sequence, len(sequence.slots))

    def grown(self, sequence: CachedSequence, former_size: int) -> None:
        """Be told that a sequence took further slots."""
        if self._counted.get(sequence) == former_size:
            self._count(sequence, len(sequence.slots))

    def shrinking(self, sequence: CachedSequence, size: int) -> None:
        """Be told that a sequence is about to release its slots from position `size` on."""
        counted = self._counted.get(sequence, 0)
        if counted > size:
            np.subtract.at(self._counts, sequence.slots[size:counted], 1)
            self._counted[sequence] = size
        if size == 0:
            self._counted.pop(sequence, None)

    def step(self, live: Iterable[CachedSequence]) -> bool:
        """Check a part, beginning a pass over `live` (every sequence, read then only) if none is going on.

        Returns whether this ended a pass. Raises AssertionError at a contradiction; a new pass begins after it.
        """
        if not self._walking and self._compared == self._pool.capacity:
            self._pending, self._counted = list(live), {}
            self._counts = np.zeros(self._pool.capacity, np.int32)
            self._walking, self._compared = True, 0
        try:
            return self._walk() if self._walking else self._compare()
        except AssertionError:
            self._walking, self._compared, self._counted = False, self._pool.capacity, {}
            raise

    def _walk(self) -> bool:
        left, sequences = WALKED_SLOTS, SEQUENCES_A_CALL
        while self._pending and left > 0 and sequences:
            sequence = self._pending[-1]
            start = self._counted.get(sequence, 0)
            end = min(len(sequence.slots), start + left)
            if sequence.alive and start < end:
                self._count(sequence, end)
                check_rows(self._pool, sequence, start, end)
                self._registry.check(sequence, start, end)
                left -= end - start
            if not sequence.alive or end == len(sequence.slots):
                self._pending.pop()
                sequences -= 1
        self._walking = bool(self._pending)
        return False

    def _compare(self) -> bool:
        part = slice(self._compared, self._compared + COMPARED_SLOTS)
        same = np.array_equal(self._counts[part], self._pool.refs[part])
        assert same, "a slot's reference count differs from its holders"
        self._compared = min(part.stop, self._pool.capacity)
        if self._compared < self._pool.capacity:
            return False
        self._counted = {}
        return True

    def _count(self, sequence: CachedSequence, end: int) -> None:
        np.add.at(self._counts, sequence.slots[self._counted.get(sequence, 0) : end], 1)
        self._counted[sequence] = end
