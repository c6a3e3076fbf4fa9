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
        pool.check_free()
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


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60)), max_size=40))
def test_slots_are_where_a_search_of_all_runs_would_take_them(history: list[tuple[int, int]]) -> None:
    """The shortest run that is long enough, else the longest ones until there are enough."""
    pool, held = SlotPool(200), []
    for n, which in history:
        runs = np.split(np.flatnonzero(pool.refs == 0), np.flatnonzero(np.diff(np.flatnonzero(pool.refs == 0)) > 1) + 1)
        lengths = sorted((len(run) for run in runs), reverse=True)
        slots = pool.allocate(n)
        if slots is not None:
            pieces = np.split(slots, np.flatnonzero(np.diff(slots) != 1) + 1)
            if lengths[0] >= n:
                assert len(pieces) == 1
                left = [length for length in lengths if length >= n]
                assert any(len(run) == left[-1] and slots[0] == run[0] for run in runs)
            else:
                assert len(pieces) <= next(k for k in range(1, len(lengths) + 1) if sum(lengths[:k]) >= n)
            held.append(slots)
        if held and which % 3:
            pool.release(held.pop(which % len(held)))


def test_misuse_is_caught() -> None:
    pool = SlotPool(8)
    slots = pool.allocate(3)
    with pytest.raises(AssertionError, match="free slot was shared"):
        pool.share(np.array([7]))
    pool.refs[4] = 1
    with pytest.raises(AssertionError, match="taken for a free one"):
        pool.allocate(5)
    pool = SlotPool(8)
    slots = pool.allocate(3)
    pool.release(slots)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(slots)
    with pytest.raises(ValueError, match="capacity is 0"):
        SlotPool(0)
