"""Content-defined chunk boundaries over token ids: a Gear rolling hash, bounded lengths, structure edges.

The hash ``h = (h << shift) + G[id]`` (mod 2^64) holds exactly the last ``window`` ids, because older ones have been
shifted out. It is never reset, so where chunks may end does not depend on where earlier ones ended. Source of the
scheme: the Irminsul paper, section on content-defined chunking; FastCDC for the Gear hash.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from irminsul_backend.chunking.presets import Preset

_NEVER = 1 << 62
_SYNC_CHUNKS = 16
"""Chunks of maximum length after a change within which the new cuts are expected to coincide with the old ones."""


def mix(ids: np.ndarray) -> np.ndarray:
    """Return the Gear value G of each id, a fixed 64-bit mix (SplitMix64's finaliser). int32 [n] -> uint64 [n]."""
    return mix64(ids.astype(np.uint64))


def mix64(values: np.ndarray) -> np.ndarray:
    """Apply SplitMix64's finaliser, a permutation of the 64-bit integers. uint64 [n] -> uint64 [n]."""
    z = values + np.uint64(0x9E3779B97F4A7C15)
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


def rolling_hash(ids: np.ndarray, preset: Preset) -> np.ndarray:
    """Return the rolling hash after each id, starting from 0. int32 [n] -> uint64 [n].

    Computed by doubling: the hash over 2k ids is that over the last k plus that over the k before, shifted by k ids.
    """
    h = mix(ids)
    k = 1
    while k < preset.window and k < len(h):
        h[k:] += h[:-k] << np.uint64(k * preset.shift)
        k *= 2
    return h


def visible_marker(preset: Preset, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Return `window` ids after which any prompt may be cut, whatever precedes them (paper, S2): int32 [window].

    They fill the hash's window, so their end is a possible cut in every prompt that contains them. Unlike a cut marker
    in the text they cost tokens and the model sees them; they exist for comparison with the marker.
    """
    rng = np.random.default_rng(seed)
    while True:
        ids = rng.integers(0, vocab_size, preset.window).astype(np.int32)
        if rolling_hash(ids, preset)[-1] < np.uint64(preset.threshold):
            return ids


def gram_hashes(ids: np.ndarray, gram: int) -> np.ndarray:
    """Hash every run of `gram` ids (a power of two) to 64 bits. int32 [n] -> uint64 [n - gram + 1], by first id.

    The hash is a polynomial in an odd base, so that all 64 bits depend on all ids; doubling as in :func:`rolling_hash`.
    """
    if gram & (gram - 1):
        raise ValueError(f"gram is {gram}; it must be a power of two")
    h, base, k = mix(ids), 0x9E3779B97F4A7C15, 1
    while k < gram and k < len(h):
        h = h[:-k] * np.uint64(base) + h[k:]
        base, k = base * base % 2**64, 2 * k
    return mix64(h) if k == gram else h[:0]


def cut(ids: np.ndarray, preset: Preset, edges: np.ndarray | None = None) -> np.ndarray:
    """Cut a prompt into chunks.

    Every chunk is `preset.minimum` to `preset.maximum` ids long; only the last may be shorter. An edge is a cut
    unless that would make a chunk shorter than the minimum (the short piece then joins the next chunk); content cuts
    stay at least the minimum before the next edge.

    Args:
        ids: int32 [n].
        edges: int32 [k], ascending offsets where a cut is wanted: markers and, with `preset.structure_cuts`, the
            template's structure.

    Returns:
        int32 [m]: chunk ends, ascending; the last is n. Empty for an empty prompt.
    """
    ends, _ = _walk(ids, preset, _inner_edges(edges, len(ids)), 0, len(ids), frozenset())
    return np.array(ends, dtype=np.int32)


def recut(
    old_ids: np.ndarray,
    old_ends: np.ndarray,
    ids: np.ndarray,
    preset: Preset,
    edges: np.ndarray | None = None,
    old_edges: np.ndarray | None = None,
) -> np.ndarray:
    """Return `cut(ids, preset, edges)`, faster, given ``old_ends = cut(old_ids, preset, old_edges)``.

    Only the part between the common prefix and the common suffix is hashed and walked, plus a few chunks around it.
    """
    n, n_old = len(ids), len(old_ids)
    edges, old_edges = _inner_edges(edges, n), _inner_edges(old_edges, n_old)
    delta = n - n_old

    # A chunk's end depends on the `maximum` ids after its start, and on edges less than `minimum` beyond those.
    same_until = min(common_prefix(old_ids, ids), _first_difference(old_edges, edges))
    starts = np.concatenate(([0], old_ends[:-1])) if len(old_ends) else np.empty(0, np.int64)
    kept = int(np.searchsorted(starts, same_until - preset.maximum - preset.minimum, side="right"))
    start = int(old_ends[kept - 1]) if kept else 0

    # From `same_from` on, hashes and edges are the old ones moved by delta; from the first common end on, all ends are.
    same_from = n - common_prefix(old_ids[::-1], ids[::-1]) + preset.window
    same_from = max(same_from, n - _first_difference((n_old - old_edges)[::-1], (n - edges)[::-1]) + 1, start)
    moved = old_ends.astype(np.int64) + delta
    first = int(np.searchsorted(moved, same_from))
    known = frozenset(moved[first:].tolist())
    stop = n
    if known and n - same_from > 2 * _SYNC_CHUNKS * preset.maximum:
        stop = same_from + _SYNC_CHUNKS * preset.maximum
    middle, met = _walk(ids, preset, edges, start, stop, known)
    if not met and stop < n:
        rest, met = _walk(ids, preset, edges, middle[-1] if middle else start, n, known)
        middle += rest
    tail = moved[int(np.searchsorted(moved, middle[-1], side="right")) :] if met else moved[:0]
    return np.concatenate((old_ends[:kept], middle, tail)).astype(np.int32)


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Count the leading elements that are equal."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _inner_edges(edges: np.ndarray | None, n: int) -> np.ndarray:
    if edges is None:
        return np.empty(0, np.int64)
    return edges[(edges > 0) & (edges < n)].astype(np.int64)


def _first_difference(a: np.ndarray, b: np.ndarray) -> int:
    """Return the smallest value that is in only one of two ascending arrays."""
    k = common_prefix(a, b)
    return min(int(a[k]) if k < len(a) else _NEVER, int(b[k]) if k < len(b) else _NEVER)


def _candidates(ids: np.ndarray, preset: Preset, start: int, stop: int) -> list[int]:
    """Return the ends in (start, stop] where the content allows a cut."""
    begin = max(0, start + 1 - preset.window)
    below = rolling_hash(ids[begin:stop], preset) < np.uint64(preset.threshold)
    ends = np.flatnonzero(below[start - begin :])
    ends += start + 1
    found: list[int] = ends.tolist()
    return found


def _walk(
    ids: np.ndarray, preset: Preset, edges: np.ndarray, start: int, stop: int, known: frozenset[int]
) -> tuple[list[int], bool]:
    """Choose chunk ends from `start` on, one chunk per iteration.

    Stops when a chunk end is in `known` (then the second result is True), at the end of `ids`, or where the next end
    would depend on ids beyond `stop`.
    """
    n, minimum, maximum = len(ids), preset.minimum, preset.maximum
    candidates = _candidates(ids, preset, start, stop)
    candidates.append(_NEVER)
    forced = edges[np.searchsorted(edges, start) :].tolist()
    forced.append(_NEVER)
    ends: list[int] = []
    c = e = 0
    while start < n and (start + maximum <= stop or stop == n):
        c = bisect_left(candidates, start + minimum, c)
        e = bisect_left(forced, start + minimum, e)
        edge = forced[e]
        # The maximum is at least twice the minimum, so a cut at `last` never makes a chunk too short.
        last = min(start + maximum, edge - minimum)
        if candidates[c] <= last:
            start = candidates[c]
        elif edge <= start + maximum:
            start = edge
        else:
            start = min(last, n)
        ends.append(start)
        if start in known:
            return ends, True
    return ends, False
