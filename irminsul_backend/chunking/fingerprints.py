"""xxHash64 fingerprints of chunks, keyed with a namespace."""

from __future__ import annotations

import numpy as np
import xxhash


def fingerprint(ids: np.ndarray, ends: np.ndarray, namespace: str) -> np.ndarray:
    """Fingerprint each chunk of `ids`.

    Args:
        ids: int32 [n].
        ends: int32 [m], chunk ends, ascending.
        namespace: whatever separates tenants; equal ids in two namespaces have unrelated fingerprints.

    Returns:
        uint64 [m]: xxh64 of the chunk's ids as little-endian int32, seeded with xxh64 of the namespace.
    """
    seed = xxhash.xxh64_intdigest(namespace.encode())
    digest = xxhash.xxh64_intdigest
    data = np.ascontiguousarray(ids, dtype="<i4").view(np.uint8).data
    stops = (np.asarray(ends, dtype=np.int64) * 4).tolist()
    return np.fromiter(
        (digest(data[a:b], seed) for a, b in zip([0, *stops], stops, strict=False)), dtype=np.uint64, count=len(stops)
    )
