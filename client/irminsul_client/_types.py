"""What a request returns: plain frozen data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from irminsul_client.errors import ServerError


@dataclass(frozen=True)
class Usage:
    """What one request cost. exact_tokens + shifted_tokens + computed_tokens == prompt_tokens."""

    prompt_tokens: int
    exact_tokens: int
    """Reused from the longest identical prefix: same ids, same positions."""
    shifted_tokens: int
    """Reused by content at another place."""
    computed_tokens: int
    segments: int
    """Number of reused runs."""
    segment_map: tuple[tuple[int, int, int], ...] = ()
    """(first position, length, shift) per reused run, in order of position; shift in tokens."""
    completion_tokens: int = 0
    queue_ms: float = 0.0
    """Waiting time in the server before the prefill began."""
    ttft_ms: float = 0.0
    """From arrival in the server's engine to the first token."""

    @classmethod
    def from_json(cls, text: str) -> Usage:
        """Parse the server's ``usage`` output; unknown keys are ignored. Raises ServerError if it is not usable."""
        try:
            values = json.loads(text)
            known = {f.name: values[f.name] for f in fields(cls) if f.name in values}
            known["segment_map"] = tuple((int(a), int(b), int(c)) for a, b, c in known.get("segment_map", ()))
            return cls(**known)
        except (ValueError, TypeError) as error:
            raise ServerError(f"the server's usage cannot be understood ({error}): {text[:200]!r}") from error


@dataclass(frozen=True)
class Chunk:
    """One piece of a streamed answer. The last one carries ``finish_reason`` and ``usage``."""

    text: str
    """New text; it can be empty while token_ids is not (an unfinished character, a possible stop word)."""
    token_ids: tuple[int, ...] = ()
    index: int = 0
    """The server's number of the response within the request; ascending, not always without gaps."""
    log_probs: tuple[float, ...] = ()
    """One natural logarithm per token id if ``return_log_probs`` was set, else empty."""
    finish_reason: str = ""
    """"" until the last chunk, then ``stop``, ``length`` or ``cancelled``."""
    usage: Usage | None = None


@dataclass(frozen=True)
class Completion:
    """A whole answer, with times measured at the client."""

    text: str
    token_ids: tuple[int, ...]
    log_probs: tuple[float, ...]
    finish_reason: str
    usage: Usage | None
    ttft_ms: float
    """From sending the request to its first token, or to the end if there was none."""
    inter_token_ms: tuple[float, ...]
    """Time between tokens; a response with k tokens counts as k equal parts. Empty where nothing was streamed."""
    total_ms: float

    def as_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        return asdict(self)


def chunk_from_outputs(outputs: Mapping[str, Any]) -> Chunk | None:
    """The Chunk in a response's outputs (name → str, number or list), or None if it only reports progress.

    ``outputs`` may lack any name. A value of a list output may be a single number: Triton's generate endpoint
    flattens lists of one.
    """
    text = str(outputs.get("text_output", ""))
    token_ids = tuple(int(i) for i in _as_list(outputs.get("output_ids")))
    reason = str(outputs.get("finish_reason", ""))
    if not (text or token_ids or reason):
        return None
    usage = outputs.get("usage")
    index = _as_list(outputs.get("index"))
    return Chunk(
        text=text,
        token_ids=token_ids,
        index=int(index[0]) if index else 0,
        log_probs=tuple(float(p) for p in _as_list(outputs.get("output_log_probs"))),
        finish_reason=reason,
        usage=Usage.from_json(usage) if usage else None,
    )


def _as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]
