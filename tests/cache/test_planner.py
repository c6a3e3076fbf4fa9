"""The planner against a naive matcher that looks at everything, on random and adversarial streams."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_backend.cache import POLICIES, CachedSequence, Registry, plan
from irminsul_backend.cache.registry import SINK_TOKENS
from irminsul_backend.chunking import PRESETS, Preset, cut, fingerprint
from irminsul_backend.request_spec import REUSE_POLICIES

NAMESPACE = "n"


def donor(registry: Registry, ids: np.ndarray, preset: str, length: int | None = None) -> CachedSequence:
    p = PRESETS[preset]
    ends = cut(ids, p, None)
    sequence = CachedSequence(
        NAMESPACE,
        "",
        ids,
        np.arange(len(ids), dtype=np.int32),
        np.zeros(len(ids), np.int16),
        ends,
        fingerprint(ids, ends, NAMESPACE, p.gram),
        gram=p.gram,
        length=len(ids) if length is None else length,
    )
    registry.publish(sequence)
    return sequence


def planned(registry: Registry, ids: np.ndarray, preset: str, reuse: str = "content", prints=None):
    p = PRESETS[preset]
    ends = cut(ids, p, None)
    prints = fingerprint(ids, ends, NAMESPACE, p.gram) if prints is None else prints[: len(ends)]
    return plan(
        registry,
        NAMESPACE,
        ids,
        ends,
        prints,
        policy=POLICIES[reuse],
        extension=p.extension,
        min_segment=p.min_segment,
        gram=p.gram,
    )


def check(segments, ids: np.ndarray) -> None:
    """What every plan must keep, however it was found."""
    at = 0
    for i, s in enumerate(segments):
        assert at <= s.start < s.end < len(ids), "in order, no overlap, the last token computed"
        assert np.array_equal(ids[s.start : s.end], s.donor.token_ids[s.donor_start :][: s.end - s.start])
        assert s.donor_start + s.end - s.start <= s.donor.length, "written rows only"
        assert s.exact == (i == 0 and s.start == 0 and s.donor_start == 0)
        if not s.exact:
            assert s.start >= SINK_TOKENS and s.donor_start >= SINK_TOKENS
        at = s.end


tokens = st.one_of(
    st.integers(2, 5).flatmap(lambda top: st.lists(st.integers(0, top), min_size=1, max_size=400)),
    st.tuples(st.lists(st.integers(0, 9), min_size=1, max_size=64), st.integers(1, 400)).map(
        lambda t: (t[0] * (t[1] // len(t[0]) + 1))[: t[1]]
    ),
    st.integers(0, 2**32 - 1).map(lambda s: np.random.default_rng(s).integers(0, 1000, 400).tolist()),
)


@given(
    st.lists(tokens, min_size=1, max_size=4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 400), st.integers(1, 200)), min_size=1, max_size=6),
    st.sampled_from(sorted(PRESETS)),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_any_plan_is_sound(known, cuttings, preset: str, collide: bool) -> None:
    """Prompts cut together from known streams; with `collide` every fingerprint is the same."""
    registry = Registry(PRESETS[preset].s1_window)
    streams = [np.array(k, np.int32) for k in known]
    for i, ids in enumerate(streams):
        donor(registry, ids, preset, length=max(1, len(ids) - 7 * i))
    prompt = np.concatenate([streams[i % len(streams)][a : a + n] for i, a, n in cuttings] + [np.array([1001])])
    prompt = prompt.astype(np.int32)
    prints = np.full(len(prompt), 5, np.uint64) if collide else None
    if collide:
        registry = Registry(PRESETS[preset].s1_window)
        for ids in streams:
            sequence = donor(Registry(), ids, preset)
            sequence.fingerprints = np.full(len(sequence.chunk_ends), 5, np.uint64)
            sequence.num_published, sequence.prefix_keys = 0, []
            registry.publish(sequence)
    for reuse in ("off", "exact", "content"):
        segments = planned(registry, prompt, preset, reuse, prints)
        check(segments, prompt)
        assert reuse != "off" or not segments
        assert reuse != "exact" or all(s.exact for s in segments)


EVERY = Preset("every", 32, 2, 2, 1, 2, structure_cuts=False, extension=True, min_segment=32, gram=32)
"""An anchor at least every second token: what it misses, the planner's walk has lost."""


def adversarial(kind: str, seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Known streams and a prompt that is made of them."""
    rng = np.random.default_rng(seed)
    base = rng.integers(0, 50000, 700).astype(np.int32)
    if kind == "edits":
        prompt = np.concatenate(([7], base)).astype(np.int32)
        prompt[:: int(rng.integers(34, 120))] = 60000
        return [base], np.append(prompt, 1).astype(np.int32)
    if kind == "shuffled":
        parts = [base[a : a + int(rng.integers(20, 150))] for a in rng.integers(0, 600, 12)]
        return [base, base[::-1].copy()], np.concatenate([*parts, [1]]).astype(np.int32)
    period = 1 if kind == "all_equal" else int(rng.integers(2, 65))
    cycle = rng.integers(0, 50000, period).astype(np.int32)

    def runs() -> np.ndarray:
        pieces = [np.tile(cycle, 400)[: int(rng.integers(30, 300))] for _ in range(4)]
        return np.concatenate([x for p in pieces for x in (rng.integers(0, 50000, 5), p)]).astype(np.int32)

    return [runs(), runs()], np.append(runs(), 1).astype(np.int32)


@pytest.mark.parametrize("kind", ["edits", "shuffled", "all_equal", "periodic"])
@given(seed=st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_nothing_long_is_missed(kind: str, seed: int) -> None:
    """A naive quadratic search in the holes finds no run that the planner should have taken."""
    streams, prompt = adversarial(kind, seed)
    registry = Registry()
    for ids in streams:
        ends = cut(ids, EVERY, None)
        prints = fingerprint(ids, ends, NAMESPACE, EVERY.gram)
        unused, exact = np.empty(0, np.int32), np.zeros(len(ids), np.int16)
        registry.publish(
            CachedSequence(NAMESPACE, "", ids, unused, exact, ends, prints, gram=EVERY.gram, length=len(ids))
        )
    ends = cut(prompt, EVERY, None)
    prints = fingerprint(prompt, ends, NAMESPACE, EVERY.gram)
    segments = plan(
        registry,
        NAMESPACE,
        prompt,
        ends,
        prints,
        policy=POLICIES["content"],
        extension=True,
        min_segment=32,
        gram=EVERY.gram,
    )
    check(segments, prompt)
    hole = np.ones(len(prompt), bool)
    hole[:SINK_TOKENS] = hole[-1] = False
    for s in segments:
        hole[s.start : s.end] = False
    too_long = 32 + 2 + SINK_TOKENS  # a gram, its sampling, and what the sink's rule may take from a first copy
    for ids in streams:
        run = np.zeros(len(ids) + 1, int)
        for i in range(len(prompt)):
            same = (ids == prompt[i]) & hole[i]
            same[:SINK_TOKENS] = False
            run[1:] = np.where(same, run[:-1] + 1, 0)
            assert run.max() < too_long


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=40, deadline=None)
def test_default_comes_close_to_a_matcher_that_compares_everything(seed: int) -> None:
    """Random text cut into pieces and shuffled: most of what a naive matcher finds is found, without any edges."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, 5000, 3000).astype(np.int32)
    registry = Registry()
    known = donor(registry, ids, "default")
    pieces = [ids[a : a + n] for a, n in zip(rng.integers(32, 2500, 8), rng.integers(300, 500, 8), strict=True)]
    prompt = np.concatenate([rng.integers(5000, 6000, 50), *pieces, [1]]).astype(np.int32)
    segments = planned(registry, prompt, "default")
    check(segments, prompt)
    naive = np.zeros(len(prompt), bool)
    for start in range(SINK_TOKENS, len(prompt) - 1 - 32):
        for at in np.flatnonzero(known.token_ids[SINK_TOKENS:-32] == prompt[start]) + SINK_TOKENS:
            if np.array_equal(prompt[start : start + 32], known.token_ids[at : at + 32]):
                naive[start : start + 32] = True
    assert sum(s.end - s.start for s in segments) >= 0.8 * naive.sum()


def test_the_former_donor_goes_on_behind_an_edit() -> None:
    """Two donors hold the second half; the one that gave the first half is preferred."""
    rng = np.random.default_rng(1)
    ids = rng.integers(0, 5000, 1000).astype(np.int32)
    registry = Registry()
    first = donor(registry, ids, "default")
    donor(registry, np.concatenate([rng.integers(0, 5000, 77), ids[500:]]).astype(np.int32), "default")
    prompt = ids.copy()
    prompt[480] += 1
    segments = planned(registry, np.append(prompt, 3).astype(np.int32), "default")
    assert [(s.start, s.end, s.donor is first, s.delta) for s in segments] == [(0, 480, True, 0), (481, 1000, True, 0)]


def test_rows_that_are_not_written_yet_are_not_proposed() -> None:
    ids = np.arange(500, dtype=np.int32)
    registry = Registry()
    donor(registry, ids, "default", length=200)
    (segment,) = planned(registry, ids, "default")
    assert segment.end == 200


def test_short_finds_are_computed() -> None:
    rng = np.random.default_rng(2)
    ids = rng.integers(0, 5000, 400).astype(np.int32)
    registry = Registry()
    known = donor(registry, ids, "default")
    short = next((a, b) for a, b in zip(known.chunk_ends, known.chunk_ends[1:], strict=False) if b - a < 32 and a >= 32)
    filler = rng.integers(5000, 9000, 100)
    prompt = np.concatenate([filler, ids[slice(*short)], filler, [1]]).astype(np.int32)
    assert not planned(registry, prompt, "default")


@pytest.mark.parametrize("preset", ["paper", "paper+s1", "default"])
def test_all_equal_and_periodic_text(preset: str) -> None:
    for ids in (np.zeros(3000, np.int32), np.tile(np.arange(7, dtype=np.int32), 500)):
        registry = Registry(PRESETS[preset].s1_window)
        donor(registry, ids, preset)
        prompt = np.concatenate([np.full(40, 9999), ids]).astype(np.int32)
        segments = planned(registry, prompt, preset)
        check(segments, prompt)
        assert sum(s.end - s.start for s in segments) > (2500 if preset == "default" else 1500)
        assert len(segments) < 30


def test_forgetting_leaves_nothing() -> None:
    registry = Registry()
    rng = np.random.default_rng(3)
    made = [donor(registry, np.tile(rng.integers(0, 50, 60), 10).astype(np.int32), "default") for _ in range(5)]
    made += [donor(registry, made[0].token_ids.copy(), "default")]
    for sequence in made:
        registry.forget(sequence)
    assert len(registry) == 0


@pytest.mark.parametrize("order", [(2, 1, 0), (0, 1, 2), (1, 2, 0)])
def test_what_others_hold_is_found_when_a_copy_goes(order: tuple[int, ...]) -> None:
    """Three sequences hold the same text, twice at another place: each is found whole while it is the only one left."""
    rng = np.random.default_rng(6)
    text = rng.integers(0, 5000, 1000).astype(np.int32)
    registry = Registry()
    holders = [donor(registry, text, "default")]
    holders += [donor(registry, np.concatenate((rng.integers(5000, 6000, 50), text)).astype(np.int32), "default")]
    holders += [donor(registry, text.copy(), "default")]
    entries = len(registry)
    moved = np.concatenate((rng.integers(5000, 6000, 70), text, [1])).astype(np.int32)
    left = list(holders)
    for i in order:
        (segment,) = planned(registry, moved, "default")
        assert segment.donor in left and segment.end - segment.start >= 1000 - SINK_TOKENS
        check([segment], moved)
        prefix = planned(registry, np.append(text, 1).astype(np.int32), "default", "exact")
        whole = [h for h in left if h is not holders[1]]
        assert bool(prefix) == bool(whole), "a prefix is where its holders are"
        assert not prefix or (prefix[0].donor in whole and prefix[0].end == 1000)
        registry.forget(holders[i])
        left.remove(holders[i])
    assert entries > 0 and len(registry) == 0


def test_an_exact_prefix_is_found_beside_a_longer_approximate_one() -> None:
    rng = np.random.default_rng(7)
    ids = rng.integers(0, 5000, 600).astype(np.int32)
    registry = Registry()
    exact = donor(registry, ids[:320], "default")
    longer = CachedSequence(
        NAMESPACE,
        "",
        ids,
        np.arange(600, dtype=np.int32),
        np.repeat([0, 1], [160, 440]).astype(np.int16),
        np.array([600], np.int32),
        np.array([1], np.uint64),
        length=600,
    )
    registry.publish(longer)
    prompt = np.append(ids, 1).astype(np.int32)
    (by_exact,), (by_content,) = planned(registry, prompt, "default", "exact"), planned(registry, prompt, "default")
    assert (by_exact.donor, by_exact.end) == (exact, 320)
    assert (by_content.donor, by_content.end) == (longer, 600)
    registry.forget(exact)
    (by_exact,) = planned(registry, prompt, "default", "exact")
    assert (by_exact.donor, by_exact.end) == (longer, 160)


def test_every_policy_that_a_request_may_name_exists() -> None:
    assert tuple(POLICIES) == REUSE_POLICIES
    assert all(policy.name == name for name, policy in POLICIES.items())
