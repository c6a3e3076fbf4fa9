"""Events on their way from the engine to the detokenizer: numbers as tensors, the rest as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from irminsul_backend.protocol import Event, GenerationRequest, Usage


def pack_event(event: Event) -> bytes:
    """Everything but token_ids and log_probs, which travel as tensors beside it."""
    values = asdict(replace(event, token_ids=(), log_probs=(), request=None))
    if event.request is not None:
        values["request"] = event.request.pack().decode()
    return json.dumps(values, separators=(",", ":")).encode()


def unpack_event(data: bytes, token_ids: Sequence[int], log_probs: Sequence[float]) -> Event:
    """The inverse of :func:`pack_event`."""
    values: dict[str, Any] = json.loads(data)
    if values["request"] is not None:
        values["request"] = GenerationRequest.unpack(values["request"])
    if values["usage"] is not None:
        values["usage"] = Usage(**values["usage"])
    return Event(**{**values, "token_ids": token_ids, "log_probs": log_probs})
