"""The check in parts: it never cries wolf while the cache changes, and finds whatever the whole check would find."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_backend.cache import POLICIES, CachedSequence, PICache, integrity
from irminsul_backend.chunking import PRESETS, cut, fingerprint

POOL = np.random.default_rng(8).integers(0, 900, 4000).astype(np.int32)
MOST_CALLS = 400


@pytest.fixture(autouse=True)
def small_parts(monkeypatch) -> None:
    monkeypatch.setattr(integrity, "WALKED_SLOTS", 37)
    monkeypatch.setattr(integrity, "COMPARED_SLOTS", 91)


def start(cache: PICache, ids: np.ndarray, max_new: int = 0) -> CachedSequence | None:
    ends = cut(ids, PRESETS["default"])
    admission = cache.admit(
        ids,
        ends,
        fingerprint(ids, ends, "n"),
        namespace="n",
        session_id="",
        policy=POLICIES["content"],
        max_new=max_new,
    )
    return admission.sequence if admission else None


def filled() -> PICache:
    """Idle and running sequences that share rows, a third of them moved."""
    cache = PICache(3000, PRESETS["default"])
    for i in range(6):
        sequence = start(cache, np.concatenate((POOL[3000 + i : 3040 + i], POOL[i * 50 : i * 50 + 400])), 20)
        assert sequence is not None
        cache.advance(sequence, 440)
        if i % 2:
            cache.retire(sequence)
    return cache


def run_passes(cache: PICache, passes: int = 2) -> None:
    for _ in range(MOST_CALLS):
        passes -= cache.check_some()
        if passes == 0:
            return
    raise AssertionError("a pass does not end")


def a_count_is_high(cache: PICache) -> None:
    cache.pool.refs[np.flatnonzero(cache.pool.refs)[50]] += 3


def a_count_is_low(cache: PICache) -> None:
    cache.pool.refs[np.flatnonzero(cache.pool.refs > 1)[0]] -= 1


def a_free_slot_is_held(cache: PICache) -> None:
    cache.pool.refs[np.flatnonzero(cache.pool.refs == 0)[0]] = 1


def a_sequence_names_anothers_slot(cache: PICache) -> None:
    a, b = list(cache._idle)[:2]
    a.slots[10] = b.slots[10]


def an_approximate_row_claims_to_be_exact(cache: PICache) -> None:
    moved = next(s for s in cache._idle if s.first_inexact < s.length)
    moved.generation[moved.first_inexact + 5] = 0


def an_entry_is_lost(cache: PICache) -> None:
    (namespace,) = cache.registry._namespaces.values()
    del namespace.content.latest[list(namespace.content.latest)[-1]]


FAULTS = [
    a_count_is_high,
    a_count_is_low,
    a_free_slot_is_held,
    a_sequence_names_anothers_slot,
    an_approximate_row_claims_to_be_exact,
    an_entry_is_lost,
]


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("calls_before", [0, 7, 60, 75, 90])
def test_every_fault_is_found_within_two_passes(fault, calls_before: int) -> None:
    cache = filled()
    for _ in range(calls_before):
        cache.check_some()
    fault(cache)
    with pytest.raises(AssertionError):
        cache.check_integrity()
    with pytest.raises(AssertionError, match=r"count|exact|holders|free"):
        run_passes(cache)


@given(
    st.lists(
        st.tuples(st.sampled_from(["start", "grow", "retire", "discard", "preempt", "check"]), st.integers(0, 900)),
        max_size=60,
    )
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_found_where_nothing_is_wrong(history: list[tuple[str, int]]) -> None:
    cache, running = PICache(900, PRESETS["default"]), []
    for action, n in history:
        if action == "start":
            sequence = start(cache, POOL[n : n + 40 + n % 200], 150)
            if sequence is not None:
                cache.advance(sequence, 40 + n % 200)
                running.append(sequence)
        elif action == "check" or not running:
            for _ in range(n % 9):
                cache.check_some()
        elif action == "grow":
            sequence = running[n % len(running)]
            if sequence.length < len(sequence.room) and cache.reserve(sequence, len(sequence.room) - sequence.length):
                cache.append(sequence, n)
                cache.advance(sequence, sequence.length + 1)
        else:
            getattr(cache, action)(running.pop(n % len(running)))
        cache.check_some()
    run_passes(cache)
    cache.check_integrity()
