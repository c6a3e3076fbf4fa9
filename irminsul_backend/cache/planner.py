"""Plans which positions of a prompt reuse which donor's rows. Pure: reads the index, changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from irminsul_backend.cache.cached_sequence import CachedSequence
from irminsul_backend.cache.interfaces import Index, Place, ReusePolicy
from irminsul_backend.cache.registry import SINK_TOKENS, s1_windows
from irminsul_backend.chunking import chunk_starts


class Segment(NamedTuple):
    """Positions [start, end) reuse the donor's rows from `donor_start` on. Every id in it was compared."""

    start: int
    end: int
    donor: CachedSequence
    donor_start: int
    exact: bool
    """Whether the segment is the longest identical prefix."""

    @property
    def delta(self) -> int:
        """δ: position in the prompt minus position in the donor."""
        return self.start - self.donor_start


def plan(
    registry: Index,
    namespace: str,
    token_ids: np.ndarray,
    chunk_ends: np.ndarray,
    fingerprints: np.ndarray,
    *,
    policy: ReusePolicy,
    extension: bool,
    min_segment: int,
    gram: int = 0,
    also_try: Sequence[CachedSequence] = (),
) -> list[Segment]:
    """Return the segments to reuse: in order of position, disjoint, never with the last token.

    Args:
        token_ids: int32 [n].
        chunk_ends, fingerprints: int32 and uint64 [chunks], from the chunker.
        policy: decides which matches may be reused.
        extension: extend a matching chunk left and right while the ids are equal.
        min_segment: tokens; shorter matches are computed instead.
        gram: number of ids that a fingerprint covers, up to its chunk's end; 0 = the whole chunk.
        also_try: donors to try before the index (the session's last sequence). Its copy of a chunk usually has the same
            text around it, which gives one long segment where the latest copies of other sessions would give several.
    """
    last = len(token_ids) - 1
    segments: list[Segment] = []
    if policy.takes_prefix:  # the lookup hashes the prompt as far as it is known
        known = registry.find_prefix(namespace, token_ids)
        length, donor = _longest_prefix(token_ids[:last], list(dict.fromkeys((*also_try, *known))), policy)
        if donor is not None:
            segments.append(Segment(0, length, donor, 0, True))
    if policy.takes_content:
        places = _Places(registry, namespace, also_try)
        search = _ContentSearch(registry.s1_window, places, namespace, token_ids, last, extension, min_segment)
        search.append_to(segments, chunk_ends, chunk_starts(chunk_ends, gram), fingerprints)
    return segments


class _ContentSearch(NamedTuple):
    """Finds segments after the prefix, chunk by chunk."""

    s1_window: int
    places: _Places
    namespace: str
    token_ids: np.ndarray
    last: int
    extension: bool
    min_segment: int

    def append_to(
        self, segments: list[Segment], chunk_ends: np.ndarray, chunk_starts: np.ndarray, fingerprints: np.ndarray
    ) -> None:
        former = segments[-1] if segments else None
        cursor = max(former.end if former else 0, SINK_TOKENS)
        ends, starts, prints = chunk_ends.tolist(), chunk_starts.tolist(), fingerprints.tolist()
        at = int(np.searchsorted(chunk_ends, cursor, side="right"))
        while at < len(ends):
            start, end = starts[at], min(ends[at], self.last)
            if max(cursor, start) >= end:
                break
            found = self._at_chunk(start, end, prints[at], cursor, former)
            at += 1
            if found is None:
                continue
            joined = former is not None and former.end == found.start and _same_line(former, found) and not former.exact
            if found.end - found.start < self.min_segment and not joined:
                continue
            if joined:
                segments[-1] = segments[-1]._replace(end=found.end)
            else:
                segments.append(found)
            former, cursor = segments[-1], found.end
            # with windows the rest of this chunk is still to be probed
            at = max(at - bool(self.s1_window), int(np.searchsorted(chunk_ends, cursor, side="right")))

    def _at_chunk(self, start: int, end: int, fingerprint: int, cursor: int, former: Segment | None) -> Segment | None:
        """Return what a chunk leads to: the segment before resumed, a place of the chunk, or of a window in it."""
        ids, last, least = self.token_ids, self.last, self.min_segment
        found = None
        if self.extension and former is not None:
            # positions before this chunk were tried with the previous chunk
            found = _resumed(ids, max(cursor, start), min(end + least, last), former, least)
        if found is not None:
            found = _extended(ids, found, cursor, last)
        elif fingerprint in self.places:
            found = _probe(self.places, ids, [(start, end, fingerprint)], cursor, last, self.extension)
        if found is None and self.s1_window:
            windows = s1_windows(ids, start, end, self.s1_window, self.namespace)
            probes = [(begin, begin + self.s1_window, key) for begin, key in windows]
            found = _probe(self.places, ids, probes, cursor, last, self.extension)
        return found


def _longest_prefix(
    token_ids: np.ndarray, donors: Sequence[CachedSequence], policy: ReusePolicy
) -> tuple[int, CachedSequence | None]:
    best, chosen = 0, None
    for donor in donors:
        usable = min(policy.prefix_length(donor), len(token_ids))
        length = _match_right(token_ids, 0, donor.token_ids, 0, usable)
        if length > best:
            best, chosen = length, donor
    return best, chosen


def _resumed(token_ids: np.ndarray, start: int, end: int, former: Segment, least: int) -> Segment | None:
    """Return the first run of at least `least` equal ids in [start, end) at the δ of the segment before.

    After a few replaced tokens both prompts are equal again, often for less than a chunk.
    """
    donor, shift = former.donor, former.delta
    start, end = max(start, shift + SINK_TOKENS), min(end, shift + donor.length)
    if end - start < least:
        return None
    differs = np.flatnonzero(token_ids[start:end] != donor.token_ids[start - shift : end - shift])
    edges = np.concatenate(([-1], differs, [end - start]))
    long_enough = np.flatnonzero(np.diff(edges) > least)
    if len(long_enough) == 0:
        return None
    first, after = edges[long_enough[0]] + 1, edges[long_enough[0] + 1]
    return Segment(start + int(first), start + int(after), donor, start + int(first) - shift, False)


class _Places:
    """Candidate places of a chunk: its first place in each donor of `also_try`, then the index's latest copy."""

    def __init__(self, registry: Index, namespace: str, also_try: Sequence[CachedSequence]) -> None:
        self._known = registry.content(namespace)
        self._also_try = [
            (donor, dict(zip(donor.fingerprints.tolist()[::-1], donor.chunk_starts.tolist()[::-1], strict=True)))
            for donor in also_try
        ]

    def __contains__(self, fingerprint: int) -> bool:
        return fingerprint in self._known or any(fingerprint in starts for _, starts in self._also_try)

    def __getitem__(self, fingerprint: int) -> list[Place]:
        found = [Place(donor, starts[fingerprint]) for donor, starts in self._also_try if fingerprint in starts]
        latest = self._known.get(fingerprint)
        if latest is not None and all(latest.donor is not place.donor for place in found):
            found.append(latest)
        return found


def _probe(
    places: _Places,
    token_ids: np.ndarray,
    probes: Sequence[tuple[int, int, int]],
    cursor: int,
    last: int,
    extension: bool,
) -> Segment | None:
    """Return the longest verified match of the first of `probes`, (start, end, fingerprint), that has any."""
    for start, end, fingerprint in probes:
        begin = max(start, cursor)
        if begin >= end:
            continue
        anchors = [_checked(token_ids, begin, end, p.donor, p.offset + begin - start) for p in places[fingerprint]]
        found = [_extended(token_ids, a, cursor, last) if extension else a for a in anchors if a is not None]
        if found:
            return max(found, key=lambda s: s.end - s.start)
    return None


def _checked(token_ids: np.ndarray, start: int, end: int, donor: CachedSequence, donor_start: int) -> Segment | None:
    if donor_start < SINK_TOKENS:
        start, donor_start = start + SINK_TOKENS - donor_start, SINK_TOKENS
    length = end - start
    if length <= 0 or donor_start + length > donor.length:
        return None
    if not np.array_equal(token_ids[start:end], donor.token_ids[donor_start : donor_start + length]):
        return None
    return Segment(start, end, donor, donor_start, False)


def _extended(token_ids: np.ndarray, found: Segment, cursor: int, last: int) -> Segment:
    donor = found.donor
    left = _match_left(
        token_ids,
        found.start,
        donor.token_ids,
        found.donor_start,
        min(found.start - cursor, found.donor_start - SINK_TOKENS),
    )
    donor_end = found.donor_start + found.end - found.start
    right = _match_right(
        token_ids, found.end, donor.token_ids, donor_end, min(last - found.end, donor.length - donor_end)
    )
    return found._replace(start=found.start - left, end=found.end + right, donor_start=found.donor_start - left)


def _same_line(a: Segment, b: Segment) -> bool:
    return a.donor is b.donor and a.delta == b.delta


def _match_right(a: np.ndarray, i: int, b: np.ndarray, j: int, limit: int) -> int:
    """Count the equal ids from a[i] and b[j] on, up to `limit`; compares in windows of doubling length."""
    done, window = 0, 64
    while done < limit:
        n = min(window, limit - done)
        differs = a[i + done : i + done + n] != b[j + done : j + done + n]
        first = int(differs.argmax())
        if differs[first]:
            return done + first
        done, window = done + n, window * 2
    return done


def _match_left(a: np.ndarray, i: int, b: np.ndarray, j: int, limit: int) -> int:
    """Count the equal ids before a[i] and b[j], up to `limit`."""
    done, window = 0, 64
    while done < limit:
        n = min(window, limit - done)
        differs = a[i - done - n : i - done] != b[j - done - n : j - done]
        if differs.any():
            return done + int(differs[::-1].argmax())
        done, window = done + n, window * 2
    return done
