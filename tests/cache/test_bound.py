from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_backend.cache import GramBound
from irminsul_backend.chunking import gram_hashes


@given(st.lists(st.lists(st.integers(0, 3), max_size=60), min_size=2, max_size=4), st.integers(0, 40))
@settings(max_examples=60, deadline=None)
def test_the_bound_is_what_a_naive_search_finds(prompts: list[list[int]], start: int) -> None:
    gram, bound, seen = 4, GramBound(4), set()
    for prompt in prompts:
        prompt = [9] * 32 + prompt  # the first 32 positions never count
        covered = set()
        for i in range(len(prompt) - gram + 1):
            if tuple(prompt[i : i + gram]) in seen:
                covered.update(range(i, i + gram))
        want = sum(max(start, 32) <= i < len(prompt) - 1 for i in covered)
        ids = np.array(prompt, np.int32)
        assert bound.count(ids, start) == want
        bound.add(ids)
        seen.update(tuple(prompt[i : i + gram]) for i in range(len(prompt) - gram + 1))


def test_hashes_tell_runs_apart_and_do_not_depend_on_their_place() -> None:
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 2, 20000).astype(np.int32)
    hashes = gram_hashes(ids, 32)
    runs = {ids[i : i + 32].tobytes() for i in range(len(ids) - 31)}
    assert len(set(hashes.tolist())) == len(runs)
    assert np.array_equal(gram_hashes(ids[777:], 32), hashes[777:])
    assert len(gram_hashes(ids[:31], 32)) == 0 and len(gram_hashes(ids[:32], 32)) == 1
