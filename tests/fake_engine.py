"""A stand-in for the engine, and the packets that reach and leave it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.protocol import Event, GenerationRequest, Usage
from irminsul_backend.triton_io.sealing import seal
from irminsul_backend.triton_io.tensors import EVENT_TENSORS, PLAN_TENSORS

USAGE = Usage(9, 1, 2, 6, 1, [(1, 2, -3)], 4, 0.5, 1.5)


class FakeEngine:
    """Takes requests; a test says what becomes of them."""

    def __init__(self) -> None:
        self.on_event: dict[str, Callable[[Event], None]] = {}
        self.stopped: list[tuple[str, str]] = []
        self.refusal: Exception | None = None
        self.status: Callable[[], dict[str, Any]] = lambda: {"integrity": "ok"}
        self.cache = self
        self.used = 0

    def stats(self) -> dict[str, Any]:
        return {"used": self.used, "capacity": 64}

    def submit(self, request: GenerationRequest, ids: Any, ends: Any, prints: Any, on_event: Any) -> None:
        if request.key == "refused":
            raise InvalidRequestError("request key 'refused' is in use")
        assert (ids.dtype, ends.dtype, prints.dtype) == (np.int32, np.int32, np.uint64)
        self.on_event[request.key] = on_event

    def stop(self, key: str, reason: str) -> bool:
        self.stopped.append((key, reason))
        return key in self.on_event

    def close(self) -> None:
        for key, on_event in self.on_event.items():
            on_event(Event(key, 99, "error", error="the server is shutting down"))


def plan(key: str = "a") -> dict[str, Any]:
    """The inputs of `irminsul_engine`."""
    request = GenerationRequest(key).pack()
    return {"token_ids": [5, 6], "chunk_ends": [2], "fingerprints": [2**64 - 1], "request": request}


def tokens(*ids: int, key: str = "a", index: int = 0) -> Event:
    return Event(key, index, "tokens", ids, [-0.5] * len(ids))


def finished(key: str = "a", index: int = 0) -> Event:
    return Event(key, index, "finished", finish_reason="length", usage=USAGE)


