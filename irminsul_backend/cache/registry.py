"""Where known content lies: (namespace, fingerprint) → donor, and (namespace, hash of a whole prefix) → donor.

A registry only ever proposes. The planner compares token ids before anything is reused, so a hash collision costs time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from irminsul_backend.cache.sequence import CachedSequence

HEAD_TOKENS = 32
"""Sequences that share this many first tokens find each other even when no chunk end falls into their common prefix."""


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
        """Register the chunks whose rows are written and that are not yet registered."""
        index = self._namespaces.setdefault(sequence.namespace, _Index({}, {}))
        exact = sequence.exact_length
        if not sequence.head_published and sequence.length >= HEAD_TOKENS:
            self._put_prefix(index, sequence, _head_key(sequence.token_ids), HEAD_TOKENS, exact)
            sequence.head_published = True
        until = int(np.searchsorted(sequence.chunk_ends, sequence.length, side="right"))
        ends = sequence.chunk_ends[:until].tolist()
        prints = sequence.fingerprints[:until].tolist()
        for i in range(sequence.num_published, until):
            start = ends[i - 1] if i else 0
            place = index.content.get(prints[i])
            if place is None or place.donor is not sequence:
                index.content[prints[i]] = Place(sequence, start)
                sequence.content_keys.append(prints[i])
            sequence.chain = _extend(sequence.chain, prints[i])
            self._put_prefix(index, sequence, sequence.chain, ends[i], exact)
        sequence.num_published = until

    def _put_prefix(self, index: _Index, sequence: CachedSequence, key: int, end: int, exact: int) -> None:
        """An exact donor is not replaced by one whose rows are approximate: `reuse="exact"` depends on it."""
        known = index.prefix.get(key)
        if known is None or exact >= end or known.exact_length < end:
            index.prefix[key] = sequence
        sequence.prefix_keys.append(key)

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

    def find_prefixes(self, namespace: str, token_ids: np.ndarray, fingerprints: np.ndarray) -> list[CachedSequence]:
        """Donors that may share a prefix: behind the longest known chain of chunks, and with the same head."""
        index = self._namespaces.get(namespace)
        if index is None:
            return []
        found: CachedSequence | None = None
        chain = 0
        for fingerprint in fingerprints.tolist():
            chain = _extend(chain, fingerprint)
            found = index.prefix.get(chain, found)
        head = index.prefix.get(_head_key(token_ids)) if len(token_ids) >= HEAD_TOKENS else None
        return [donor for donor in (found, head) if donor is not None]

    def entries(self) -> list[tuple[str, int, Place]]:
        """Every content entry, for integrity checks."""
        return [(name, key, place) for name, index in self._namespaces.items() for key, place in index.content.items()]


def _extend(chain: int, fingerprint: int) -> int:
    return hash((chain, fingerprint))


def _head_key(token_ids: np.ndarray) -> int:
    return hash((-1, token_ids[:HEAD_TOKENS].tobytes()))
