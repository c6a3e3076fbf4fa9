"""How events travel from the engine to the detokenizer: numbers as tensors, the rest as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from irminsul_backend.protocol import Event, GenerationRequest, Usage

if TYPE_CHECKING:
    import triton_python_backend_utils as pb_utils

_DEFAULTS = {
    f.name: f.default for f in fields(Event) if f.default is not MISSING and f.name not in ("token_ids", "log_probs")
}
"""What an event leaves out: one is packed for every token of every request."""


@dataclass(eq=False)
class Outgoing:
    """One request's response sender and how far its stream has come."""

    sender: pb_utils.InferenceResponseSender
    sent: int = 0
    """Number of events sent."""
    due: float = 0.0
    """Seconds on the monotonic clock before which further tokens wait."""
    ended: bool = False
    """Whether nothing more is sent."""


def merge(batch: Iterable[tuple[Outgoing, Event]]) -> list[tuple[Outgoing, Event]]:
    """Join the waiting tokens of each request into one event, so that a sender that lags catches up."""
    merged: list[tuple[Outgoing, Event]] = []
    last: dict[Outgoing, int] = {}
    for outgoing, event in batch:
        place = last.setdefault(outgoing, len(merged))
        if place == len(merged):
            merged.append((outgoing, event))
            continue
        former = merged[place][1]
        if former.kind == "tokens" and event.kind in ("tokens", "finished"):
            token_ids, log_probs = [*former.token_ids, *event.token_ids], [*former.log_probs, *event.log_probs]
            merged[place] = outgoing, replace(event, token_ids=token_ids, log_probs=log_probs)
        else:
            last[outgoing] = len(merged)
            merged.append((outgoing, event))
    return merged


def hold_back(
    merged: list[tuple[Outgoing, Event]], now: float
) -> tuple[list[tuple[Outgoing, Event]], list[tuple[Outgoing, Event]]]:
    """Split events into (those to send now, those to keep).

    Tokens that are not due yet are kept, unless another event of their request follows.
    """
    last = {outgoing: i for i, (outgoing, _) in enumerate(merged)}
    send: list[tuple[Outgoing, Event]] = []
    keep: list[tuple[Outgoing, Event]] = []
    for i, (outgoing, event) in enumerate(merged):
        early = event.kind == "tokens" and now < outgoing.due and last[outgoing] == i
        (keep if early else send).append((outgoing, event))
    return send, keep


def pack_event(event: Event) -> bytes:
    """Encode an event as JSON, without token_ids and log_probs, which travel as tensors."""
    values: dict[str, Any] = {"key": event.key, "index": event.index, "kind": event.kind}
    for name, default in _DEFAULTS.items():
        value = getattr(event, name)
        if value != default:
            values[name] = value
    if event.request is not None:
        values["request"] = event.request.pack().decode()
    if event.usage is not None:
        values["usage"] = event.usage.as_dict()
    return json.dumps(values, separators=(",", ":")).encode()


def unpack_event(data: bytes, token_ids: Sequence[int], log_probs: Sequence[float]) -> Event:
    """Decode what :func:`pack_event` encoded. token_ids: [n], log_probs: [n] or empty."""
    values: dict[str, Any] = json.loads(data)
    if "request" in values:
        values["request"] = GenerationRequest.unpack(values["request"])
    if "usage" in values:
        values["usage"] = Usage(**values["usage"])
    return Event(**values, token_ids=token_ids, log_probs=log_probs)
