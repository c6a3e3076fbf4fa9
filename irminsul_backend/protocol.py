"""The nouns that travel between the Triton models: request, event, usage. Plain data, JSON in a BYTES tensor."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from irminsul_backend.request_spec import SamplingParams

FinishReason = Literal["", "stop", "length", "cancelled"]
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

    def pack(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def unpack(cls, data: bytes) -> GenerationRequest:
        values = json.loads(data)
        values["sampling"] = SamplingParams(**values["sampling"])
        return cls(**values)


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
