"""From keyword arguments to the input tensors of the Triton models. Knows the tensor contract and nothing else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

from irminsul_client.errors import InvalidRequest

Reuse = Literal["off", "exact", "content"]


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``stream`` and ``generate``. One of messages, text and input_ids is needed;
    None counts as not given."""

    messages: Sequence[Mapping[str, Any]]
    """Chat messages; the server renders them with the model's own template."""
    text: str
    """A prompt that is tokenised as it is."""
    input_ids: Sequence[int]
    """A prompt that is tokenised already."""
    tools: Sequence[Mapping[str, Any]]
    """Tool schemas for the chat template."""
    max_tokens: int | None
    reuse: Reuse | None
    """Which earlier work may be used again: none, the exact prefix, or any known content (the server's default)."""
    cache_salt: str | None
    """Only requests of equal salt share cached work."""
    temperature: float
    """0, the server's default, is greedy."""
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    stop_words: Sequence[str]
    bad_words: Sequence[str]
    end_id: int
    ignore_eos: bool
    return_log_probs: bool
    echo: bool
    """Put the prompt's text in front of the answer."""


class TensorSpec(NamedTuple):
    """How one input is sent: Triton's datatype, and whether it is a list (shape [n]) or a single value (shape [1])."""

    datatype: str
    is_list: bool = False


TENSORS: dict[str, TensorSpec] = {
    "text_input": TensorSpec("BYTES"),
    "messages": TensorSpec("BYTES"),
    "tools": TensorSpec("BYTES"),
    "input_ids": TensorSpec("INT32", is_list=True),
    "max_tokens": TensorSpec("INT32"),
    "stop_words": TensorSpec("BYTES", is_list=True),
    "bad_words": TensorSpec("BYTES", is_list=True),
    "top_k": TensorSpec("INT32"),
    "top_p": TensorSpec("FP32"),
    "temperature": TensorSpec("FP32"),
    "min_p": TensorSpec("FP32"),
    "repetition_penalty": TensorSpec("FP32"),
    "presence_penalty": TensorSpec("FP32"),
    "frequency_penalty": TensorSpec("FP32"),
    "seed": TensorSpec("UINT64"),
    "stream": TensorSpec("BOOL"),
    "end_id": TensorSpec("INT32"),
    "ignore_eos": TensorSpec("BOOL"),
    "return_log_probs": TensorSpec("BOOL"),
    "exclude_input_in_output": TensorSpec("BOOL"),
    "reuse": TensorSpec("BYTES"),
    "cache_salt": TensorSpec("BYTES"),
    "session_id": TensorSpec("BYTES"),
    "session_end": TensorSpec("BOOL"),
}
"""Inputs of `irminsul`; the last two belong to the HTTP entrances only."""

PROMPTS = ("messages", "text", "input_ids")


def build_fields(options: Mapping[str, Any], *, stream: bool) -> dict[str, Any]:
    """Tensor name → plain value (str, int, float, bool, or a list of them).

    ``options`` are RequestOptions; None counts as not given. Raises TypeError for an unknown name and InvalidRequest
    if there is not exactly one prompt, messages/tools are not JSON or a list is none. The server judges the rest.
    """
    unknown = options.keys() - RequestOptions.__annotations__.keys()
    if unknown:
        raise TypeError(
            f"unknown request option {sorted(unknown)[0]!r}; known: {', '.join(RequestOptions.__annotations__)}"
        )
    given = {name: value for name, value in options.items() if value is not None}
    prompts = [name for name in PROMPTS if name in given]
    if len(prompts) != 1:
        found = " and ".join(prompts) if prompts else "none"
        raise InvalidRequest(f"a request needs exactly one of {', '.join(PROMPTS)}; {found} given")

    fields: dict[str, Any] = {"stream": stream}
    for name, value in given.items():
        if name == "text":
            fields["text_input"] = value
        elif name == "echo":
            fields["exclude_input_in_output"] = not value
        elif name in ("messages", "tools"):
            fields[name] = _to_json(name, value)
        elif TENSORS[name].is_list:
            values = _to_list(name, value)
            if values or name == "input_ids":
                fields[name] = values
        else:
            fields[name] = value
    return fields


def _to_list(name: str, value: Any) -> list[Any]:
    """A single text is refused: as a sequence it would be its letters."""
    texts = TENSORS[name].datatype == "BYTES"
    try:
        values = None if isinstance(value, str | bytes) else list(value)
    except TypeError:
        values = None
    if values is None or (texts and not all(isinstance(v, str | bytes) for v in values)):
        raise InvalidRequest(
            f"{name} must be a list of {'texts' if texts else 'whole numbers'}; it is {shorten(value)}"
        )
    return values


def shorten(value: Any) -> str:
    """The value as an error message shows it."""
    shown = repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _to_json(name: str, value: Sequence[Mapping[str, Any]]) -> str:
    try:
        return json.dumps(list(value), ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{name} cannot be written as JSON: {error}") from error
