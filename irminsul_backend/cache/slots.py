"""The slot pool: reference count, base position and generation of each slot.

Bookkeeping only (numpy); the rows themselves are in the model runner's pool, at the same indices.
"""

from __future__ import annotations

import numpy as np

from irminsul_backend.cache.interfaces import Pool


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

    def allocate(self, n: int) -> np.ndarray | None:
        """Allocate n slots with one reference each; int32 [n], or None, changing nothing, if fewer are free.

        The slots form as few contiguous runs as possible, because attention on the CPU reads a run as a view: the
        smallest run that is long enough, otherwise the longest ones.
        """
        if n > self.num_free:
            return None
        if n == 0:
            return np.empty(0, np.int32)
        free = np.flatnonzero(self.refs == 0)
        starts = np.concatenate(([0], np.flatnonzero(np.diff(free) != 1) + 1))
        lengths = np.diff(np.append(starts, len(free)))
        fitting = np.flatnonzero(lengths >= n)
        if len(fitting):
            at = starts[fitting[np.argmin(lengths[fitting])]]
            slots = free[at : at + n]
        else:
            longest_first = np.argsort(-lengths, kind="stable")
            count = int(np.searchsorted(np.cumsum(lengths[longest_first]), n)) + 1
            chosen = longest_first[:count]
            slots = np.concatenate([free[starts[i] : starts[i] + lengths[i]] for i in chosen])[:n]
        slots = slots.astype(np.int32)
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
        freed = len(np.unique(slots[left == 0]))
        self.num_free += freed
        return freed
