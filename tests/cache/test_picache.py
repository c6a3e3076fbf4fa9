"""Random histories of admissions, progress, ends and evictions: integrity holds after every step."""

from __future__ import annotations

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from irminsul_backend.cache import POLICIES, Admission, CachedSequence, PICache
from irminsul_backend.cache.cache import HEADROOM
from irminsul_backend.cache.cached_sequence import MAX_GENERATION
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
        self.forgotten: set[CachedSequence] = set()
        self.cache = new_cache(1500)
        self.content = np.full(1500, -1)
        self.running: list[tuple[Admission, int]] = []

    @rule(
        parts=st.lists(st.tuples(st.integers(0, 3500), st.integers(1, 300)), min_size=1, max_size=4),
        reuse=st.sampled_from(["off", "exact", "content"]),
        namespace=st.sampled_from(["n", "m"]),
        max_new=st.integers(0, 400),
    )
    def start(self, parts, reuse: str, namespace: str, max_new: int) -> None:
        ids = np.concatenate([POOL[a : a + n] for a, n in parts])
        if len(ids) + max_new > 1500:
            with pytest.raises(CapacityError):
                admit(self.cache, ids, reuse=reuse, namespace=namespace, max_new=max_new)
            return
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
            assert s.donor.namespace == namespace and s.donor not in self.forgotten
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
    @rule(which=st.integers(0, 100), tokens=st.integers(1, 60))
    def decode(self, which: int, tokens: int) -> None:
        admission, done = self.running[which % len(self.running)]
        s = admission.sequence
        if done < len(admission.holes):
            return
        for token in POOL[which : which + min(tokens, len(s.room) - s.length)].tolist():
            before, size = self.cache.stats(), len(s.slots)
            if not self.cache.reserve(s):
                assert len(self.running) > 1, "a sequence that runs alone gets its slots"
                assert self.cache.stats() == before
                return
            assert (self.cache.pool.refs[s.slots[size:]] == 1).all()
            self.content[s.slots[size:]] = -1
            self.cache.append(s, token)
            self.content[s.slots[s.length]] = token
            self.cache.advance(s, s.length + 1)
        assert (self.content[s.slots[: s.length]] == s.token_ids[: s.length]).all()

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 100), how=st.sampled_from(["retire", "discard", "preempt"]))
    def end(self, which: int, how: str) -> None:
        s = self.running.pop(which % len(self.running))[0].sequence
        getattr(self.cache, how)(s)
        assert self.cache.is_cached(s) == (how != "discard" and s.length > 0 and s not in self.forgotten)

    @rule(namespace=st.sampled_from(["n", "m"]))
    def forget_namespace(self, namespace: str) -> None:
        self.cache.forget_namespace(namespace)
        running = {admission.sequence for admission, _ in self.running}
        self.forgotten |= {s for s in running if s.namespace == namespace}
        assert all(s in running for s in self.cache._of_namespace.get(namespace, ()))

    @invariant()
    def donors_hold_their_own_rows(self) -> None:
        for s in self.cache._idle:
            assert (self.content[s.slots] == s.token_ids).all()

    @invariant()
    def integrity(self) -> None:
        self.cache.check_integrity()
        self.cache.check_some()

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


def test_slots_are_taken_as_tokens_come() -> None:
    """Many requests that may write long answers, and write short ones, fit together."""
    cache = new_cache(2000)
    running = [admit(cache, POOL[i * 100 : i * 100 + 100], max_new=1800).sequence for i in range(10)]
    for sequence in running:
        cache.advance(sequence, 100)
        for token in range(50):
            assert cache.reserve(sequence)
            cache.append(sequence, token)
            cache.advance(sequence, sequence.length + 1)
    assert cache.stats()["used"] <= 10 * (100 + 2 * HEADROOM)
    cache.check_integrity()


def test_idle_donors_make_way_for_an_answer() -> None:
    cache = new_cache(400)
    finish(cache, admit(cache, POOL[:300]), 300)
    sequence = admit(cache, POOL[1000:1050], max_new=350).sequence
    cache.advance(sequence, 50)
    assert cache.reserve(sequence, 350) and cache.stats()["idle"] == 0
    assert len(np.unique(sequence.slots)) == 400
    with pytest.raises(AssertionError, match="admitted for 400 tokens, not 401"):
        cache.reserve(sequence, 351)


def test_a_preempted_sequence_goes_on_with_one_token_to_compute() -> None:
    cache = new_cache(1000)
    finish(cache, admit(cache, POOL[2000:2500]), 500)
    sequence = admit(cache, POOL[:200], max_new=100).sequence
    cache.advance(sequence, 200)
    for token in POOL[200:220].tolist():
        assert cache.reserve(sequence)
        cache.append(sequence, token)
        cache.advance(sequence, sequence.length + 1)
    cache.preempt(sequence)
    rows = sequence.slots.copy()
    other = admit(cache, POOL[1000:1400])
    assert other is not None and cache.is_cached(sequence), "the other donor made way"
    again = admit(cache, POOL[:221], max_new=79)
    assert again.holes.tolist() == [220] and np.array_equal(again.sequence.slots[:220], rows)
    assert not cache.is_cached(sequence), "it lies whole inside the new one"
    cache.check_integrity()


@given(
    requests=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 60), st.integers(0, 60)), min_size=1, max_size=8),
    reuse=st.sampled_from(["off", "exact", "content"]),
)
@settings(max_examples=80, deadline=None)
def test_every_request_ends_if_the_latest_is_preempted(requests, reuse: str) -> None:
    """Requests that fit the pool one by one, admitted whenever they fit: the oldest goes on, so all of them end."""
    cache, waiting, running = new_cache(120), deque(), []
    for at, n, more in requests:
        waiting.append((POOL[at : at + n], POOL[at : at + n + more]))
    steps = 0
    while waiting or running:
        steps += 1
        assert steps < 2000, "nobody makes progress"
        while waiting:
            ids, whole = waiting[0]
            admission = admit(cache, ids, reuse=reuse, max_new=len(whole) - len(ids))
            if admission is None:
                assert running
                break
            cache.advance(admission.sequence, len(ids))
            running.append((admission.sequence, waiting.popleft()[1]))
        for sequence, whole in list(running):
            if (sequence, whole) not in running:
                continue  # preempted in this step
            if sequence.length == len(whole):
                running.remove((sequence, whole))
                cache.retire(sequence)
                assert np.array_equal(sequence.token_ids, whole)
                continue
            while not cache.reserve(sequence):
                latest, its_whole = running.pop()
                done = whole_ids(latest)
                cache.preempt(latest)
                waiting.appendleft((done, its_whole))
                if latest is sequence:
                    break
            else:
                cache.append(sequence, int(whole[sequence.length]))
                cache.advance(sequence, sequence.length + 1)
        cache.check_integrity()
    assert cache.stats()["running"] == 0


def whole_ids(sequence: CachedSequence) -> np.ndarray:
    return sequence.token_ids[: sequence.length].copy()


def test_a_forgotten_namespace_gives_nothing_any_more() -> None:
    cache = new_cache(2000)
    finish(cache, admit(cache, POOL[:300]), 300)
    finish(cache, admit(cache, POOL[:300], namespace="other"), 300)
    running = admit(cache, np.concatenate((POOL[:300], POOL[1000:1100])))
    cache.advance(running.sequence, 400)
    cache.forget_namespace("n")
    assert not admit(cache, POOL[:350]).segments, "neither the idle donor nor the running one is found"
    finish(cache, running, 400)
    assert not cache.is_cached(running.sequence), "what ran meanwhile leaves no donor"
    (kept,) = admit(cache, POOL[:301], namespace="other").segments
    assert kept.end == 300 and kept.donor.namespace == "other"
    cache.forget_namespace("never seen")
    cache.check_integrity()


def test_generations_saturate() -> None:
    """A chain of content reuse longer than the counter's range stays approximate."""
    cache = new_cache(5000)
    body = POOL[:400]
    finish(cache, admit(cache, body), 400)
    moved = admit(cache, np.concatenate((POOL[3000:3040], body)))
    cache.pool.generation[moved.sequence.slots[moved.sequence.generation > 0]] = MAX_GENERATION - 1
    finish(cache, moved, 440)
    cache.discard(moved.segments[0].donor)
    for i in range(3):
        chained = admit(cache, np.concatenate((POOL[3100 : 3141 + i], body, POOL[3200:3210])))
        assert chained.sequence.generation[200:].min() == MAX_GENERATION
        finish(cache, chained, len(chained.sequence.token_ids))
        prompt = np.append(chained.sequence.token_ids, 1).astype(np.int32)
        exact = admit(cache, prompt, reuse="exact")
        assert sum(s.end - s.start for s in exact.segments) <= chained.sequence.first_inexact
        cache.discard(exact.sequence)


def test_an_evicted_copy_does_not_hide_an_older_one() -> None:
    """1,000 rows are held twice; the later copy goes; the older one serves them, id for id."""
    cache = new_cache(5000)
    text = POOL[:1000]
    first = admit(cache, np.concatenate((POOL[3000:3040], text)), reuse="off")
    finish(cache, first, 1040)
    second = admit(cache, np.concatenate((POOL[3100:3140], text)), reuse="off")
    finish(cache, second, 1040)
    cache.discard(second.sequence)
    (segment,) = admit(cache, np.concatenate((POOL[3200:3250], text, POOL[:1]))).segments
    assert segment.donor is first.sequence and segment.end - segment.start == 1000
    assert np.array_equal(segment.donor.token_ids[segment.donor_start :][:1000], text)


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
