"""The content index: (namespace, chunk fingerprint) → place, and (namespace, hash of a prefix) → donor.

Lookups are proposals: the planner compares token ids before a row is reused, so a hash collision only costs time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from irminsul_backend.cache.cached_sequence import CachedSequence
from irminsul_backend.cache.interfaces import Index, Place
from irminsul_backend.chunking import fingerprint

PREFIX_BLOCK = 16
"""Block size of the prefix index, in tokens; the planner extends a prefix match token by token."""

SINK_TOKENS = 32
"""Positions below this are the attention sink: reuse by content neither takes rows from them nor puts rows there."""


class _Entries(NamedTuple):
    content: dict[int, Place]
    prefix: dict[int, CachedSequence]


class Registry(Index):
    """Hash-table index. It keeps the copy of the latest sequence, and within one sequence the first occurrence."""

    def __init__(self, s1_window: int = 0) -> None:
        """s1_window: if not 0, also index windows of this many tokens in longer chunks (``Preset.s1_window``)."""
        self.s1_window = s1_window
        self._namespaces: dict[str, _Entries] = {}

    def __len__(self) -> int:
        return sum(len(index.content) + len(index.prefix) for index in self._namespaces.values())

    def publish(self, sequence: CachedSequence) -> None:
        """Index the prefix blocks and chunks whose rows are written and that are not indexed yet."""
        index = self._namespaces.setdefault(sequence.namespace, _Entries({}, {}))
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
        new = slice(sequence.num_published, until)
        starts, prints = sequence.chunk_starts[new].tolist(), sequence.fingerprints[new].tolist()
        for start, key in zip(starts, prints, strict=True):
            self._put_content(index, sequence, start, key)
        if self.s1_window:
            for start, end in zip(starts, sequence.chunk_ends[new].tolist(), strict=True):
                windows = s1_windows(sequence.token_ids, start, end, self.s1_window, sequence.namespace)
                for at, key in windows:
                    self._put_content(index, sequence, at, key)
        sequence.num_published = until

    def _put_content(self, index: _Entries, sequence: CachedSequence, start: int, key: int) -> None:
        if start < SINK_TOKENS:
            return  # never reusable, and it must not displace a later occurrence
        place = index.content.get(key)
        if place is None or place.donor is not sequence:
            index.content[key] = Place(sequence, start)
            sequence.content_keys.append(key)

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

    def content(self, namespace: str) -> Mapping[int, Place]:
        """Return the place of each known fingerprint of the namespace: the index's own table, not a copy."""
        index = self._namespaces.get(namespace)
        return index.content if index else {}

    def find_prefix(self, namespace: str, token_ids: np.ndarray) -> CachedSequence | None:
        """Return the donor that holds the longest known prefix of `token_ids` in whole blocks, or None."""
        index = self._namespaces.get(namespace)
        found: CachedSequence | None = None
        if index is not None:
            for key in _block_keys(token_ids, 0):
                found = index.prefix.get(key, found)
        return found

    def entries(self) -> Iterator[tuple[str, CachedSequence, int]]:
        """Yield every entry as (namespace, donor, position that must be written), for integrity checks."""
        for name, index in self._namespaces.items():
            yield from ((name, place.donor, place.offset) for place in index.content.values())
            yield from ((name, donor, 0) for donor in index.prefix.values())


def s1_windows(token_ids: np.ndarray, start: int, end: int, window: int, namespace: str) -> list[tuple[int, int]]:
    """Return (first position, fingerprint) of each full window of `window` ids in a chunk that is longer than one."""
    stops = np.arange(start + window, end + 1, window)
    if end - start <= window:
        return []
    prints = fingerprint(token_ids[start:end], stops - start, namespace)
    return list(zip((stops - window).tolist(), prints.tolist(), strict=True))


def _block_keys(token_ids: np.ndarray, chain: int) -> Iterator[int]:
    """Yield one key per full block of int32 `token_ids`: a hash of all blocks up to it; `chain` is the key before."""
    data, step = token_ids.tobytes(), PREFIX_BLOCK * token_ids.itemsize
    for at in range(0, len(data) - step + 1, step):
        chain = hash((chain, data[at : at + step]))
        yield chain
