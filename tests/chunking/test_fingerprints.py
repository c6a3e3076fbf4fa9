"""Chunk fingerprints: keyed, position-free, and exactly the documented function."""

from __future__ import annotations

import struct

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from irminsul_backend.chunking import fingerprint

chunks = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=20), max_size=6)


def joined(parts: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([i for part in parts for i in part], np.int32)
    return ids, np.cumsum([len(part) for part in parts]).astype(np.int32)


@given(chunks, st.text())
def test_is_seeded_xxh64_of_little_endian_int32(parts: list[list[int]], namespace: str) -> None:
    got = fingerprint(*joined(parts), namespace)
    seed = xxhash.xxh64(namespace.encode()).intdigest()
    want = [xxhash.xxh64(struct.pack(f"<{len(p)}i", *p), seed=seed).intdigest() for p in parts]
    assert got.dtype == np.uint64
    assert got.tolist() == want


@given(chunks.filter(len), st.text(), st.text())
def test_namespaces_are_apart(parts: list[list[int]], a: str, b: str) -> None:
    ids, ends = joined(parts)
    equal = fingerprint(ids, ends, a) == fingerprint(ids, ends, b)
    assert equal.all() if a == b else not equal.any()


@given(chunks)
def test_the_same_chunk_has_the_same_fingerprint_anywhere(parts: list[list[int]]) -> None:
    forward = fingerprint(*joined(parts), "x").tolist()
    assert fingerprint(*joined(parts[::-1]), "x").tolist() == forward[::-1]


def test_strided_ids_are_read_in_order() -> None:
    ids = np.arange(20, dtype=np.int32)
    ends = np.array([4, 10], np.int32)
    assert (fingerprint(ids[::2], ends, "") == fingerprint(ids[::2].copy(), ends, "")).all()
