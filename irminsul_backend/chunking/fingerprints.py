"""xxHash64 fingerprints of chunks, keyed with a namespace."""

from __future__ import annotations

import numpy as np
import xxhash


def chunk_starts(ends: np.ndarray, gram: int = 0) -> np.ndarray:
    """Return the start of what each fingerprint covers, int64 [m]: the previous end, or `gram` ids before its own."""
    ends = np.asarray(ends, dtype=np.int64)
    return np.maximum(ends - gram, 0) if gram else np.concatenate(([0], ends[:-1]))[: len(ends)]


def fingerprint(ids: np.ndarray, ends: np.ndarray, namespace: str, gram: int = 0) -> np.ndarray:
    """Fingerprint each chunk of `ids`, or the `gram` ids before each end.

    Args:
        ids: int32 [n].
        ends: int32 [m], chunk ends, ascending.
        namespace: the scope of reuse; equal ids in two namespaces have unrelated fingerprints.

    Returns:
        uint64 [m]: xxh64 of the chunk's ids as little-endian int32, seeded with xxh64 of the namespace.
    """
    seed = xxhash.xxh64_intdigest(namespace.encode())
    digest = xxhash.xxh64_intdigest
    data = np.ascontiguousarray(ids, dtype="<i4").view(np.uint8).data
    starts = (chunk_starts(ends, gram) * 4).tolist()
    stops = (np.asarray(ends, dtype=np.int64) * 4).tolist()
    return np.fromiter(
        (digest(data[a:b], seed) for a, b in zip(starts, stops, strict=True)), dtype=np.uint64, count=len(stops)
    )
