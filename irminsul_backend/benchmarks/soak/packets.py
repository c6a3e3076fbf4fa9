"""What the chunker would send to the engine, made by hand: for requests that go to an inner model directly."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from irminsul_backend.chunking import PRESETS, cut, fingerprint

IDS = np.random.default_rng(5).integers(16, 8000, 300).astype(np.int32)
"""A prompt of random ids above the special ones."""


def salted(salt: str) -> str:
    """The namespace that the chunker makes of a salt."""
    return json.dumps(["salt", salt])


def packet(key: str, ids: np.ndarray = IDS, namespace: Any = "soak", **changes: Any) -> dict[str, Any]:
    """Tensors of a direct call of irminsul_engine; `changes` go into the packed request."""
    preset = PRESETS["default"]
    ends = cut(ids, preset, None)
    prints = fingerprint(ids, ends, namespace if isinstance(namespace, str) else "soak", preset.gram)
    request = {"key": key, "namespace": namespace, "sampling": {"max_tokens": 2}, **changes}
    return {"token_ids": ids, "chunk_ends": ends, "fingerprints": prints, "request": json.dumps(request)}
