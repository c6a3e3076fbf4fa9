"""The nouns that travel between the Triton models: request, event, usage. Plain data, JSON in a BYTES tensor."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from reprlib import repr as cut_repr
from typing import Any, Literal

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.request_spec import SamplingParams

FinishReason = Literal["", "stop", "length", "cancelled"]
EngineState = Literal["running", "draining", "closed", "failed"]
EventKind = Literal["admitted", "progress", "tokens", "finished", "error"]


@dataclass(frozen=True)
class GenerationRequest:
    """One validated request, as the chunker hands it on. The prompt's token ids travel beside it as a tensor."""

    key: str
    """Unique among all requests of the server; `stop` control requests name it."""
    session_id: str = ""
    namespace: str = ""
    """Rows are shared inside one namespace only (tenant salt, or the session)."""
    reuse: str = "content"
    """Name of the reuse policy."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stream: bool = False
    end_ids: Sequence[int] = ()
    """Generation stops after any of these ids (empty: only max_tokens and stop words end it)."""
    bad_words: Sequence[Sequence[int]] = ()
    """Token sequences that must not be completed."""
    stop_words: Sequence[str] = ()
    return_log_probs: bool = False
    echo: str = ""
    """Prompt text to put in front of the output (TRT-LLM's exclude_input_in_output = false)."""
    timeout_ms: int = 0
    """The request fails if it has not finished so long after its arrival in the engine; 0 = never."""
    priority: int = 0
    """Requests of higher priority go first."""

    def pack(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes | str) -> GenerationRequest:
        """Return the request that :meth:`pack` wrote; raises InvalidRequestError if it lacks a field or has another.

        The values of the fields are not checked.
        """
        try:
            values = json.loads(data)
        except (ValueError, RecursionError) as error:
            raise InvalidRequestError(f"the request is not JSON: {str(error)[:200]}") from error
        values = _known_fields(cls, "the request", values)
        values["sampling"] = SamplingParams(**_known_fields(SamplingParams, "sampling", values.get("sampling", {})))
        if "key" not in values:
            raise InvalidRequestError("the request has no key; it must be a text that no other request has")
        return cls(**values)


def _known_fields(kind: type, name: str, values: Any) -> dict[str, Any]:
    """Return the JSON object `values`, all of whose members are fields of the dataclass `kind`."""
    if not isinstance(values, dict):
        raise InvalidRequestError(f"{name} is {cut_repr(values)}; it must be a JSON object")
    known = [f.name for f in fields(kind)]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise InvalidRequestError(f"{name} has the unknown field {cut_repr(unknown[0])}; known are {', '.join(known)}")
    return values


@dataclass(frozen=True)
class Usage:
    """What one request cost. exact_tokens + shifted_tokens + computed_tokens == prompt_tokens, always."""

    prompt_tokens: int
    exact_tokens: int
    """Reused from the longest identical prefix: same ids, same positions."""
    shifted_tokens: int
    """Reused by content, at any other place (a δ of 0 behind a difference counts here too)."""
    computed_tokens: int
    segments: int
    """Number of reused runs, the exact prefix included."""
    segment_map: Sequence[tuple[int, int, int]] = ()
    """(first position, length, δ = position here - position in the donor) per reused run, in order."""
    completion_tokens: int = 0
    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    """From arrival in the engine to the first token."""
    prefill_ms: float = 0.0
    """From the end of the wait to the first token."""
    inter_token_ms: float = 0.0
    """Mean time between two tokens of the answer."""
    preemptions: int = 0
    """How often the request gave way to others and was resumed."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Event:
    """What the engine reports about one request. Events of a request come in order of `index`, from 0."""

    key: str
    index: int
    kind: EventKind
    token_ids: Sequence[int] = ()
    """New tokens (kind `tokens`; `finished` may carry the last ones). An end id is not among them."""
    log_probs: Sequence[float] = ()
    finish_reason: FinishReason = ""
    request: GenerationRequest | None = None
    """On `admitted`: what the detokenizer must know."""
    usage: Usage | None = None
    """On `finished`."""
    prefilled: int = 0
    """Prompt tokens whose rows are ready (kind `progress`)."""
    error: str = ""
    """On `error`, which ends the request."""


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine's state as plain numbers, taken between two steps and never changed afterwards."""

    state: EngineState = "running"
    waiting: int = 0
    """Requests that have not begun, or gave way to others."""
    running: int = 0
    """Requests that are being prefilled or decoded."""
    cache: Mapping[str, int] = field(default_factory=dict)
    """Slots and donors of the cache, as `PICache.stats` names them."""
    counters: Mapping[str, int] = field(default_factory=dict)
    """Counts since the start, by name."""
    taken: float = 0.0
    """When, as time.monotonic() tells it."""
