"""Where known content lies: (namespace, chunk fingerprint) → place, and (namespace, hash of a whole prefix) → donor.

A registry only ever proposes. The planner compares token ids before anything is reused, so a hash collision costs time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from irminsul_backend.cache.sequence import CachedSequence

PREFIX_BLOCK = 16
"""Granularity at which whole prefixes are known, in tokens from position 0; the planner goes on token by token."""


class Place(NamedTuple):
    donor: CachedSequence
    offset: int
    """Position in the donor at which the chunk starts."""


class _Index(NamedTuple):
    content: dict[int, Place]
    prefix: dict[int, CachedSequence]


class Registry:
    """Latest copy wins between sequences; inside one sequence the first occurrence stays."""

    def __init__(self) -> None:
        self._namespaces: dict[str, _Index] = {}

    def __len__(self) -> int:
        return sum(len(index.content) + len(index.prefix) for index in self._namespaces.values())

    def publish(self, sequence: CachedSequence) -> None:
        """Register the prefix blocks and chunks whose rows are written and that are not yet registered."""
        index = self._namespaces.setdefault(sequence.namespace, _Index({}, {}))
        known_keys = len(sequence.prefix_keys)
        chain = sequence.prefix_keys[-1] if known_keys else 0
        for key in _block_keys(sequence.token_ids[known_keys * PREFIX_BLOCK : sequence.length], chain):
            sequence.prefix_keys.append(key)
            end = len(sequence.prefix_keys) * PREFIX_BLOCK
            known = index.prefix.get(key)
            # An exact donor is not replaced by one whose rows are approximate: reuse="exact" depends on it.
            if known is None or sequence.exact_length >= end or known.exact_length < end:
                index.prefix[key] = sequence
        until = int(np.searchsorted(sequence.chunk_ends, sequence.length, side="right"))
        starts = np.concatenate(([0], sequence.chunk_ends))[sequence.num_published : until].tolist()
        prints = sequence.fingerprints[sequence.num_published : until].tolist()
        for start, fingerprint in zip(starts, prints, strict=True):
            place = index.content.get(fingerprint)
            if place is None or place.donor is not sequence:
                index.content[fingerprint] = Place(sequence, start)
                sequence.content_keys.append(fingerprint)
        sequence.num_published = until

    def forget(self, sequence: CachedSequence) -> None:
        """Remove every entry that names the sequence."""
        index = self._namespaces.get(sequence.namespace)
        if index is None:
            return
        for key in sequence.content_keys:
            place = index.content.get(key)
            if place is not None and place.donor is sequence:
                del index.content[key]
        for key in sequence.prefix_keys:
            if index.prefix.get(key) is sequence:
                del index.prefix[key]
        if not index.content and not index.prefix:
            del self._namespaces[sequence.namespace]

    def find_chunk(self, namespace: str, fingerprint: int) -> Place | None:
        index = self._namespaces.get(namespace)
        return index.content.get(fingerprint) if index else None

    def find_prefix(self, namespace: str, token_ids: np.ndarray) -> CachedSequence | None:
        """The donor behind the longest known prefix of `token_ids`, in blocks."""
        index = self._namespaces.get(namespace)
        found: CachedSequence | None = None
        if index is not None:
            for key in _block_keys(token_ids, 0):
                found = index.prefix.get(key, found)
        return found

    def entries(self) -> Iterator[tuple[str, CachedSequence, int]]:
        """Every entry as (namespace, donor, position that must be written), for integrity checks."""
        for name, index in self._namespaces.items():
            yield from ((name, place.donor, place.offset) for place in index.content.values())
            yield from ((name, donor, 0) for donor in index.prefix.values())


def _block_keys(token_ids: np.ndarray, chain: int) -> Iterator[int]:
    """One key per whole block of int32 `token_ids`, each the hash of all blocks up to it; `chain` is the key before."""
    data, step = token_ids.tobytes(), PREFIX_BLOCK * token_ids.itemsize
    for at in range(0, len(data) - step + 1, step):
        chain = hash((chain, data[at : at + step]))
        yield chain
