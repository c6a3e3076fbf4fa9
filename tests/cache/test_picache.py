"""Random histories of admissions, progress, ends and evictions: integrity holds after every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from irminsul_backend.cache import POLICIES, Admission, PICache
from irminsul_backend.chunking import PRESETS, cut, fingerprint
from irminsul_backend.errors import CapacityError

PRESET = PRESETS["default"]
POOL = np.random.default_rng(4).integers(0, 900, 4000).astype(np.int32)


def admit(cache: PICache, ids: np.ndarray, *, reuse: str = "content", namespace: str = "n", max_new: int = 0):
    ends = cut(ids, PRESET, None)
    return cache.admit(
        ids,
        ends,
        fingerprint(ids, ends, namespace),
        namespace=namespace,
        session_id="s",
        policy=POLICIES[reuse],
        max_new=max_new,
    )


def finish(cache: PICache, admission: Admission, length: int) -> None:
    cache.advance(admission.sequence, length)
    cache.retire(admission.sequence)


def new_cache(capacity: int) -> PICache:
    return PICache(capacity, PRESET)


class Histories(RuleBasedStateMachine):
    """`content` models the rows: what each slot holds is the token it was written for, and the base position."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = new_cache(1500)
        self.content = np.full(1500, -1)
        self.running: list[tuple[Admission, int]] = []

    @rule(
        parts=st.lists(st.tuples(st.integers(0, 3500), st.integers(1, 300)), min_size=1, max_size=4),
        reuse=st.sampled_from(["off", "exact", "content"]),
        namespace=st.sampled_from(["n", "m"]),
        max_new=st.integers(0, 50),
    )
    def start(self, parts, reuse: str, namespace: str, max_new: int) -> None:
        ids = np.concatenate([POOL[a : a + n] for a, n in parts])
        before = self.cache.stats()
        admission = admit(self.cache, ids, reuse=reuse, namespace=namespace, max_new=max_new)
        if admission is None:
            assert self.running, "an empty engine can admit whatever fits the pool"
            assert self.cache.stats() == before
            return
        sequence, segments, holes = admission
        covered = np.zeros(len(ids), int)
        covered[holes] += 1
        for s in segments:
            covered[s.start : s.end] += 1
            assert s.donor.namespace == namespace
        assert (covered == 1).all(), "segments and holes cover the prompt once"
        assert holes[-1] == len(ids) - 1
        reused = np.setdiff1d(np.arange(len(ids)), holes)
        assert (self.content[sequence.slots[reused]] == ids[reused]).all(), "a reused row belongs to another token"
        fresh = np.setdiff1d(np.arange(len(sequence.slots)), reused)
        assert (self.cache.pool.refs[sequence.slots[fresh]] == 1).all()
        assert (self.cache.pool.base[sequence.slots[fresh]] == fresh).all()
        self.content[sequence.slots[fresh]] = -1
        self.running.append((admission, 0))

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), tokens=st.integers(1, 300))
    def progress(self, which: int, tokens: int) -> None:
        i = which % len(self.running)
        admission, done = self.running[i]
        holes, s = admission.holes, admission.sequence
        new = holes[done : done + tokens]
        self.content[s.slots[new]] = s.token_ids[new]
        done += len(new)
        self.cache.advance(s, int(holes[done]) if done < len(holes) else int(holes[-1]) + 1)
        self.running[i] = (admission, done)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), keep=st.booleans())
    def end(self, which: int, keep: bool) -> None:
        admission, _ = self.running.pop(which % len(self.running))
        s = admission.sequence
        if keep:
            self.cache.retire(s)
        else:
            self.cache.discard(s)

    @invariant()
    def integrity(self) -> None:
        self.cache.check_integrity()

    def teardown(self) -> None:
        for admission, _ in self.running:
            self.cache.discard(admission.sequence)
        self.cache.clear()
        self.cache.check_integrity()
        assert self.cache.pool.num_free == 1500
        assert len(self.cache.registry) == 0


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase


def test_a_shared_run_is_counted_once() -> None:
    """A prompt and its extension hold their common rows once; ending both leaves one copy."""
    cache = new_cache(2000)
    first = admit(cache, POOL[:600])
    finish(cache, first, 600)
    second = admit(cache, np.concatenate((POOL[2000:2050], POOL[100:600])))
    assert cache.stats()["used"] == 600 + len(second.holes)
    finish(cache, second, 550)
    assert cache.stats()["used"] == 600 + len(second.holes)


def test_a_longer_turn_replaces_the_shorter_one() -> None:
    cache = new_cache(5000)
    for n in range(100, 1100, 100):
        finish(cache, admit(cache, POOL[:n]), n)
    assert (cache.stats()["idle"], cache.stats()["used"]) == (1, 1000)


def test_tool_outputs_stay_while_agents_take_turns() -> None:
    """A parent and two children whose prompts together exceed the pool, but not what they share counted once."""
    cache = new_cache(1500)
    parent, a, b = POOL[:500], POOL[1000:1200], POOL[2000:2200]
    prompts = [parent, np.concatenate((parent, a)), np.concatenate((parent, b))]
    for prompt in prompts:
        finish(cache, admit(cache, prompt), len(prompt))
    for _ in range(5):
        for prompt in prompts:
            admission = admit(cache, prompt)
            assert len(admission.holes) == 1, "nobody's turn is cold"
            finish(cache, admission, len(prompt))


def test_generation_counts_content_reuse_only() -> None:
    cache = new_cache(5000)
    body = POOL[:400]
    finish(cache, admit(cache, body), 400)
    moved = admit(cache, np.concatenate((POOL[3000:3040], body, POOL[3100:3150])))
    generation = moved.sequence.generation
    start, length = moved.segments[0].start, moved.segments[0].end - moved.segments[0].start
    assert (generation[:start] == 0).all() and (generation[start:] == 1).all() and length > 300
    finish(cache, moved, 490)
    appended = admit(cache, np.concatenate((moved.sequence.token_ids, POOL[3200:3240])))
    assert (appended.sequence.generation[start:] == 1).all(), "an exact prefix adds no further approximation"
    assert appended.sequence.first_inexact == start


def test_too_large_a_request_is_an_error_with_both_numbers() -> None:
    with pytest.raises(CapacityError, match=r"prompt of 90 tokens \+ 11 to generate = 101 exceeds the KV pool of 100"):
        admit(new_cache(100), POOL[:90], max_new=11)


def test_metadata_is_bounded() -> None:
    """Idle donors that share all their rows cost no slots; their token ids are bounded all the same."""
    cache = new_cache(400)
    finish(cache, admit(cache, POOL[:300]), 300)
    for i in range(200):
        prompt = np.concatenate((POOL[:300], POOL[1000 + i : 1003 + i]))
        finish(cache, admit(cache, prompt), len(prompt))
    assert cache.stats()["idle_tokens"] <= 4 * 400


@pytest.mark.parametrize("preset", ["default", "grams"])
@pytest.mark.parametrize("lengths", [(100, 0), (100, 1), (7, 90), (40, 300)])
def test_a_retired_answer_is_cut_where_cutting_it_afterwards_would(preset: str, lengths: tuple[int, int]) -> None:
    chosen, (n, more) = PRESETS[preset], lengths
    cache = PICache(1000, chosen)
    ids = POOL[: n + more]
    ends = cut(ids[:n], chosen)
    prints = fingerprint(ids[:n], ends, "n", chosen.gram)
    admission = cache.admit(ids[:n], ends, prints, namespace="n", session_id="s", policy=POLICIES["off"], max_new=more)
    assert admission is not None
    sequence = admission.sequence
    cache.advance(sequence, n)
    for token in ids[n:].tolist():
        assert cache.reserve(sequence)
        cache.append(sequence, token)
        cache.advance(sequence, sequence.length + 1)
    cache.retire(sequence)
    assert np.array_equal(sequence.token_ids, ids)
    whole = np.concatenate((ends, n + cut(ids[n:], chosen))) if more else ends
    assert np.array_equal(sequence.chunk_ends, whole)
    assert np.array_equal(sequence.fingerprints, fingerprint(ids, whole, "n", chosen.gram))
    cache.check_integrity()
