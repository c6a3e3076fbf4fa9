"""A stand-in for the engine, and the packets that reach and leave it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.protocol import EngineSnapshot, Event, GenerationRequest, Usage
from irminsul_backend.triton_io.events import pack_event
from irminsul_backend.triton_io.sealing import seal, unseal
from irminsul_backend.triton_io.tensors import EVENT_TENSORS, PLAN_TENSORS, TensorSpec, from_array

USAGE = Usage(9, 1, 2, 6, 1, [(1, 2, -3)], 4, 0.5, 1.5)


class FakeMetrics:
    """Takes note of ended requests."""

    def __init__(self) -> None:
        self.counted: list[Event] = []
        self.closed = False
        self.failure: Exception | None = None

    def count(self, event: Event) -> None:
        if self.failure:
            raise self.failure
        self.counted.append(event)

    def close(self) -> None:
        self.closed = True


class FakeEngine:
    """Takes requests; a test says what becomes of them."""

    def __init__(self) -> None:
        self.on_event: dict[str, Callable[[Event], None]] = {}
        self.stopped: list[tuple[str, str]] = []
        self.refusal: Exception | None = None
        self.status: Callable[[], dict[str, Any]] = lambda: {"integrity": "ok"}
        self.state = EngineSnapshot(cache={"used": 0, "capacity": 64})

    def snapshot(self) -> EngineSnapshot:
        return self.state

    def submit(self, request: GenerationRequest, ids: Any, ends: Any, prints: Any, on_event: Any) -> None:
        if request.key == "refused":
            raise InvalidRequestError("request key 'refused' is in use")
        assert (ids.dtype, ends.dtype, prints.dtype) == (np.int32, np.int32, np.uint64)
        self.on_event[request.key] = on_event

    def stop(self, key: str, reason: str = "cancelled") -> bool:
        self.stopped.append((key, reason))
        return key in self.on_event

    def close(self) -> None:
        for key, on_event in self.on_event.items():
            on_event(Event(key, 99, "error", error="the server is shutting down"))


def plan(key: str = "a") -> dict[str, Any]:
    """The inputs of `irminsul_engine`."""
    return sealed_plan(GenerationRequest(key).pack())


def sealed_packet(specs: Sequence[TensorSpec], **values: Any) -> dict[str, Any]:
    """The inputs of a model of ours, as another one sends them."""
    sealed = seal(specs, values)
    return {name: value if isinstance(value, bytes) else value[0] for name, value in sealed.items()}


def sealed_plan(request: bytes) -> dict[str, Any]:
    return sealed_packet(PLAN_TENSORS, token_ids=[5, 6], chunk_ends=[2], fingerprints=[2**64 - 1], request=request)


def sealed_event(event: Event) -> dict[str, Any]:
    """The inputs of `irminsul_detokenizer`."""
    return sealed_packet(
        EVENT_TENSORS, output_ids=event.token_ids, output_log_probs=event.log_probs, event=pack_event(event)
    )


def opened(specs: Sequence[TensorSpec], response: Any) -> dict[str, Any]:
    """A response with a packet, as the next model reads it."""
    by_name = {spec.name: spec for spec in specs}
    return unseal(specs, {t.name(): from_array(by_name[t.name()], t.as_numpy()) for t in response.output_tensors()})


def tokens(*ids: int, key: str = "a", index: int = 0) -> Event:
    return Event(key, index, "tokens", ids, [-0.5] * len(ids))


def finished(key: str = "a", index: int = 0) -> Event:
    return Event(key, index, "finished", finish_reason="length", usage=USAGE)
