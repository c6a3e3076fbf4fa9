"""The content index: (namespace, chunk fingerprint) → places, and (namespace, hash of a prefix) → donors.

Lookups are proposals: the planner compares token ids before a row is reused, so a hash collision only costs time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from irminsul_backend.cache.cached_sequence import CachedSequence
from irminsul_backend.cache.interfaces import Index, Place
from irminsul_backend.chunking import fingerprint

PREFIX_BLOCK = 16
"""Block size of the prefix index, in tokens; the planner extends a prefix match token by token."""

SINK_TOKENS = 32
"""Positions below this are the attention sink: reuse by content neither takes rows from them nor puts rows there."""


class _Table:
    """Key → one place of every sequence that holds it: the latest in `latest`, the others in order in `earlier`.

    Most keys have one holder, so `earlier` is a table apart, and lookups read `latest` alone.
    """

    def __init__(self) -> None:
        self.latest: dict[int, Place] = {}
        self.earlier: dict[int, dict[CachedSequence, Place]] = {}

    def put(self, key: int, place: Place) -> bool:
        """Add a holder; False, changing nothing, if the sequence holds the key already."""
        former = self.latest.get(key)
        if former is None:
            self.latest[key] = place
            return True
        earlier = self.earlier.get(key)
        if former.donor is place.donor or (earlier is not None and place.donor in earlier):
            return False
        if earlier is None:
            self.earlier[key] = {former.donor: former}
        else:
            earlier[former.donor] = former
        self.latest[key] = place
        return True

    def drop(self, keys: Sequence[int], donor: CachedSequence) -> None:
        """Remove a holder from its keys; the latest of the others is found there from now on."""
        latest, earlier = self.latest, self.earlier
        for key in keys:
            others = earlier.get(key) if earlier else None
            if others is None:
                only = latest.pop(key)
                assert only.donor is donor, "a sequence is not among the holders of its key"
                continue
            if latest[key].donor is donor:
                _, latest[key] = others.popitem()
            else:
                del others[donor]
            if not others:
                del earlier[key]

    def holds(self, key: int, donor: CachedSequence) -> bool:
        latest = self.latest.get(key)
        return latest is not None and (latest.donor is donor or donor in self.earlier.get(key, ()))

    def places(self) -> Iterator[Place]:
        yield from self.latest.values()
        for earlier in self.earlier.values():
            yield from earlier.values()


class _Namespace(NamedTuple):
    content: _Table
    exact: _Table
    """Prefixes whose holders have only exact rows there."""
    approximate: _Table
    """Prefixes whose holders have approximate rows there; `reuse = exact` may take the beginning of one."""


class Registry(Index):
    """Hash-table index. An entry knows all its holders; lookups give the latest, and its first occurrence there."""

    def __init__(self, s1_window: int = 0) -> None:
        """s1_window: if not 0, also index windows of this many tokens in longer chunks (``Preset.s1_window``)."""
        self.s1_window = s1_window
        self._namespaces: dict[str, _Namespace] = {}
        self._num_entries = 0

    def __len__(self) -> int:
        return self._num_entries

    def publish(self, sequence: CachedSequence) -> None:
        """Index the prefix blocks and chunks whose rows are written and that are not indexed yet."""
        index = self._namespaces.get(sequence.namespace)
        if index is None:
            index = self._namespaces[sequence.namespace] = _Namespace(_Table(), _Table(), _Table())
        self._publish_prefixes(index, sequence)
        until = int(np.searchsorted(sequence.chunk_ends, sequence.length, side="right"))
        new = slice(sequence.num_published, until)
        starts, prints = sequence.chunk_starts[new].tolist(), sequence.fingerprints[new].tolist()
        for start, key in zip(starts, prints, strict=True):
            self._publish_content(index, sequence, start, key)
        if self.s1_window:
            for start, end in zip(starts, sequence.chunk_ends[new].tolist(), strict=True):
                windows = s1_windows(sequence.token_ids, start, end, self.s1_window, sequence.namespace)
                for at, key in windows:
                    self._publish_content(index, sequence, at, key)
        sequence.num_published = until

    def _publish_prefixes(self, index: _Namespace, sequence: CachedSequence) -> None:
        keys, place = sequence.prefix_keys, Place(sequence, 0)
        known, chain = len(keys), keys[-1] if keys else 0
        num_exact = sequence.first_inexact // PREFIX_BLOCK
        for key in _block_keys(sequence.token_ids[known * PREFIX_BLOCK : sequence.length], chain):
            if not (index.exact if len(keys) < num_exact else index.approximate).put(key, place):
                break  # two prefixes of one sequence have one hash: what follows is found no more
            keys.append(key)
        self._num_entries += len(keys) - known

    def _publish_content(self, index: _Namespace, sequence: CachedSequence, start: int, key: int) -> None:
        # A chunk in the sink is never reusable, and must not stand in for a later occurrence.
        if start >= SINK_TOKENS and index.content.put(key, Place(sequence, start)):
            sequence.content_keys.append(key)
            self._num_entries += 1

    def forget(self, sequence: CachedSequence) -> None:
        """Remove every entry that names the sequence; what other sequences hold as well is found in them."""
        index = self._namespaces.get(sequence.namespace)
        if index is None:
            return
        num_exact = sequence.first_inexact // PREFIX_BLOCK
        index.content.drop(sequence.content_keys, sequence)
        index.exact.drop(sequence.prefix_keys[:num_exact], sequence)
        index.approximate.drop(sequence.prefix_keys[num_exact:], sequence)
        self._num_entries -= len(sequence.content_keys) + len(sequence.prefix_keys)
        sequence.content_keys, sequence.prefix_keys = [], []
        if not any(table.latest for table in index):
            del self._namespaces[sequence.namespace]

    def content(self, namespace: str) -> Mapping[int, Place]:
        """Return the latest place of each known fingerprint of the namespace: the index's own table, not a copy."""
        index = self._namespaces.get(namespace)
        return index.content.latest if index else {}

    def find_prefix(self, namespace: str, token_ids: np.ndarray) -> list[CachedSequence]:
        """Return the donors of the longest known prefix in whole blocks: of the exact one, and of a longer one."""
        index = self._namespaces.get(namespace)
        if index is None:
            return []
        exact: CachedSequence | None = None
        longest: CachedSequence | None = None
        for key in _block_keys(token_ids, 0):
            place = index.exact.latest.get(key)
            if place is not None:
                exact = longest = place.donor
                continue
            place = index.approximate.latest.get(key)
            if place is None:
                break  # whoever holds a longer prefix holds this one
            longest = place.donor
        return [donor for donor in dict.fromkeys((exact, longest)) if donor is not None]

    def check(self, sequence: CachedSequence, start: int, end: int) -> None:
        index, size = self._namespaces.get(sequence.namespace), len(sequence.slots)
        for keys in (sequence.content_keys, sequence.prefix_keys):
            first, after = start * len(keys) // size, end * len(keys) // size
            for at, key in enumerate(keys[first:after], first):
                assert index is not None, "a sequence's entries are gone"
                if keys is sequence.content_keys:
                    table = index.content
                else:
                    table = index.exact if at < sequence.first_inexact // PREFIX_BLOCK else index.approximate
                assert table.holds(key, sequence), "a sequence is not among the holders of its key"

    def entries(self) -> Iterator[tuple[str, CachedSequence, int]]:
        """Yield every entry as (namespace, donor, position that must be written), for integrity checks."""
        for name, index in self._namespaces.items():
            for table in index:
                yield from ((name, place.donor, place.offset) for place in table.places())


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
