from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul_backend.cache import SlotPool


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 40)), max_size=60))
def test_free_plus_used_is_capacity_under_any_history(history: list[tuple[str, int]]) -> None:
    pool = SlotPool(64)
    held: list[np.ndarray] = []
    for action, n in history:
        if action == "allocate":
            free = pool.num_free
            slots = pool.allocate(n)
            assert (slots is None) == (n > free)
            if slots is not None:
                assert len(np.unique(slots)) == len(slots) == n
                assert all(not np.intersect1d(slots, other).size for other in held)
                held.append(slots)
        elif held and action == "share":
            slots = held[n % len(held)]
            slots = np.concatenate([slots, slots[: n % 3]])
            pool.share(slots)
            held.append(slots)
        elif held:
            pool.release(held.pop(n % len(held)))
        counts = np.bincount(np.concatenate([*held, np.empty(0, np.int32)]).astype(int), minlength=64)
        assert np.array_equal(counts, pool.refs)
        assert pool.num_free == int((counts == 0).sum())
    for slots in held:
        pool.release(slots)
    assert pool.num_free == 64


def test_the_smallest_stretch_that_is_long_enough_is_taken() -> None:
    pool = SlotPool(100)
    every = pool.allocate(100)
    pool.release(every[[*range(10, 20), *range(40, 46), *range(60, 90)]])
    assert pool.allocate(6).tolist() == list(range(40, 46))
    assert pool.allocate(8).tolist() == list(range(10, 18))
    assert pool.allocate(31).tolist()[:30] == list(range(60, 90)), "longest stretches first when none is long enough"


def test_misuse_is_caught() -> None:
    pool = SlotPool(8)
    slots = pool.allocate(3)
    with pytest.raises(AssertionError, match="free slot was shared"):
        pool.share(np.array([7]))
    pool.release(slots)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(slots)
    with pytest.raises(ValueError, match="capacity is 0"):
        SlotPool(0)
