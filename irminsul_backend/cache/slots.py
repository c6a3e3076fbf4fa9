"""The slot pool: reference count, base position and generation of each slot.

Bookkeeping only (numpy); the rows themselves are in the model runner's pool, at the same indices.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

import numpy as np

from irminsul_backend.cache.interfaces import Pool

NO_SLOTS = np.empty(0, np.int32)


class FreeRuns:
    """The free slots as runs that do not touch, by their ends and by length; taking one never looks at the others.

    Runs of one length are kept together: a pool of n slots has at most about sqrt(2 n) different lengths at once.
    """

    def __init__(self, capacity: int) -> None:
        self._end_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        self._starts_by_length: dict[int, dict[int, None]] = {}
        self._lengths: list[int] = []  # ascending
        self.add(0, capacity)

    def add(self, start: int, end: int) -> None:
        """Add slots [start, end), none of which is free; runs that touch are joined."""
        if start in self._start_of:
            start, _ = self._remove(self._start_of[start], start)
        if end in self._end_of:
            _, end = self._remove(end, self._end_of[end])
        self._end_of[start], self._start_of[end] = end, start
        starts = self._starts_by_length.get(end - start)
        if starts is None:
            starts = self._starts_by_length[end - start] = {}
            bisect.insort(self._lengths, end - start)
        starts[start] = None

    def take(self, n: int) -> tuple[int, int]:
        """Take n slots, 1 or more, from the shortest run that has them, or else the longest run whole: [start, end)."""
        length = self._lengths[min(bisect.bisect_left(self._lengths, n), len(self._lengths) - 1)]
        start, _ = self._starts_by_length[length].popitem()  # a dict finds its last item fast, not its first
        _, end = self._remove(start, start + length)
        if end - start > n:
            self.add(start + n, end)
            end = start + n
        return start, end

    def _remove(self, start: int, end: int) -> tuple[int, int]:
        del self._end_of[start], self._start_of[end]
        starts = self._starts_by_length[end - start]
        starts.pop(start, None)
        if not starts:
            del self._starts_by_length[end - start]
            del self._lengths[bisect.bisect_left(self._lengths, end - start)]
        return start, end

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self._end_of.items())


class SlotPool(Pool):
    """Reference-counted slots. A slot without a reference is free; there is no other state.

    `base` and `generation` are meaningless while a slot is free.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity} slots; it must be at least 1")
        self.capacity = capacity
        self.refs = np.zeros(capacity, np.int32)
        self.base = np.zeros(capacity, np.int32)
        self.generation = np.zeros(capacity, np.int16)
        self.num_free = capacity
        self._free = FreeRuns(capacity)

    def allocate(self, n: int) -> np.ndarray | None:
        """Allocate n slots with one reference each; int32 [n], or None, changing nothing, if fewer are free.

        The slots form as few contiguous runs as possible, because attention on the CPU reads a run as a view: the
        smallest run that is long enough, otherwise the longest ones.
        """
        if n > self.num_free:
            return None
        runs = []
        left = n
        while left:
            runs.append(self._free.take(left))
            left -= runs[-1][1] - runs[-1][0]
        slots: np.ndarray = np.concatenate([NO_SLOTS, *(np.arange(start, end, dtype=np.int32) for start, end in runs)])
        assert not self.refs[slots].any(), "a slot that is in use was taken for a free one"
        self.refs[slots] = 1
        self.num_free -= n
        return slots

    def share(self, slots: np.ndarray) -> None:
        """Add one reference per entry of int32 `slots`. Entries may repeat; free slots cannot be shared."""
        assert (self.refs[slots] > 0).all(), "a free slot was shared"
        np.add.at(self.refs, slots, 1)

    def release(self, slots: np.ndarray) -> int:
        """Drop one reference per entry of int32 `slots`; returns how many slots became free."""
        np.subtract.at(self.refs, slots, 1)
        left = self.refs[slots]
        assert (left >= 0).all(), "a slot was released more often than it was held"
        freed = np.unique(slots[left == 0])
        breaks = np.flatnonzero(np.diff(freed) != 1) + 1
        starts = freed[np.concatenate(([0], breaks))[: len(freed)]]
        lasts = freed[np.concatenate((breaks, [len(freed)]))[: len(freed)] - 1]
        for start, last in zip(starts.tolist(), lasts.tolist(), strict=True):
            self._free.add(start, last + 1)
        self.num_free += len(freed)
        return len(freed)

    def check_free(self) -> None:
        """Raise AssertionError if the free slots are not those without a reference; looks at all of them."""
        free = np.zeros(self.capacity, bool)
        for start, end in self._free:
            free[start:end] = True
        assert np.array_equal(free, self.refs == 0), "the free runs are not the slots without a reference"
        assert self.num_free == int(np.count_nonzero(free)), "free + used != capacity"
