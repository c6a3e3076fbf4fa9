"""The nouns that travel between the Triton models: request, event, usage. Plain data, JSON in a BYTES tensor."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from irminsul_backend.errors import InvalidRequestError

REUSE_MODES = ("off", "exact", "content")
MAX_SESSION_ID_BYTES = 128
DEFAULT_MAX_TOKENS = 128

FinishReason = Literal["", "stop", "length", "cancelled"]
EventKind = Literal["admitted", "progress", "tokens", "finished", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. Names and meanings follow TRT-LLM's tensors; the defaults are greedy."""

    max_tokens: int = DEFAULT_MAX_TOKENS
    temperature: float = 0.0
    """0 is greedy."""
    top_k: int = 0
    """0 = no limit."""
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Same seed, same request, same reuse history: same tokens. None draws one."""

    def validate(self) -> None:
        """Raise InvalidRequestError naming the field, its value and the limit."""

        def check(name: str, ok: bool, limit: str) -> None:
            value = getattr(self, name)
            if not (math.isfinite(value) and ok):
                raise InvalidRequestError(f"{name} is {value}; it must be {limit}")

        check("max_tokens", self.max_tokens >= 1, "at least 1")
        check("temperature", self.temperature >= 0, "a finite number, at least 0 (0 is greedy)")
        check("top_k", self.top_k >= 0, "at least 0 (0 = no limit)")
        check("top_p", 0 < self.top_p <= 1, "over 0 and at most 1")
        check("min_p", 0 <= self.min_p <= 1, "between 0 and 1")
        check("repetition_penalty", self.repetition_penalty > 0, "a finite number over 0 (1 = none)")
        check("presence_penalty", True, "a finite number")
        check("frequency_penalty", True, "a finite number")


@dataclass(frozen=True)
class GenerationRequest:
    """One validated request, as the chunker hands it on. The prompt's token ids travel beside it as a tensor."""

    key: str
    """Unique among all requests of the server; `stop` control requests name it."""
    session_id: str = ""
    namespace: str = ""
    """Rows are shared inside one namespace only (tenant salt, or the session)."""
    reuse: Literal["off", "exact", "content"] = "content"
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
