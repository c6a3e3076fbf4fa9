"""Request options and input tensors; generated from the server's table of inputs by `make generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypedDict

Reuse = Literal["off", "exact", "content"]


class RequestOptions(TypedDict, total=False):
    """Keyword arguments of ``stream`` and ``generate``; None counts as not given.

    Exactly one of text, messages, input_ids is needed.
    """

    text: str | None
    """A prompt that is tokenised as it is."""
    messages: Sequence[Mapping[str, Any]] | None
    """Chat messages, rendered with the model's own chat template; JSON on the wire."""
    input_ids: Sequence[int] | None
    """A prompt that is tokenised already."""
    tools: Sequence[Mapping[str, Any]] | None
    """Tool schemas for the chat template, only with messages; JSON on the wire."""
    max_tokens: int | None
    """Most tokens to generate; the default shrinks to what the model's context has room for."""
    temperature: float | None
    """Divides the logits; 0 is greedy."""
    top_k: int | None
    """Sample among the k most likely tokens; 0 sets no limit."""
    top_p: float | None
    """Sample among the most likely tokens that together reach this probability."""
    min_p: float | None
    """Leave out tokens less likely than this times the likeliest one."""
    repetition_penalty: float | None
    """Divides the positive logits of tokens in prompt and answer, multiplies the negative ones."""
    presence_penalty: float | None
    """Subtracted once from the logits of tokens in the answer."""
    frequency_penalty: float | None
    """Subtracted from the logits of tokens in the answer, once per occurrence."""
    seed: int | None
    """Same seed, same request, same reuse history: same tokens. Drawn at random if absent."""
    stop_words: Sequence[str] | None
    """Texts that end the answer, at most 256; they are not part of it."""
    bad_words: Sequence[str] | None
    """Texts that must not be generated, at most 256."""
    end_id: int | None
    """Token id that ends the answer, instead of the model's own."""
    ignore_eos: bool | None
    """No token id ends the answer."""
    return_log_probs: bool | None
    """Return each token's natural log-probability under the model."""
    echo: bool | None
    """Put the prompt's text in front of the answer."""
    reuse: Reuse | None
    """Which cached rows may be used: none, those of the exact prefix, or those of any known content."""
    allow_special_tokens: bool | None
    """What is written like a special token is one; by default in text_input, and not in messages and tools."""
    cache_salt: str | None
    """Only requests of equal salt share cached rows; by default all without a salt share."""
    timeout_ms: int | None
    """Time in milliseconds, waiting included, after which a request that has not finished fails."""
    priority: int | None
    """Requests of higher priority are computed first, and may displace those of lower priority."""


class TensorSpec(NamedTuple):
    """How one input is sent: Triton's datatype, and whether it is a list (otherwise one value)."""

    datatype: str
    is_list: bool = False


TENSORS: dict[str, TensorSpec] = {
    "text_input": TensorSpec("BYTES"),
    "messages": TensorSpec("BYTES"),
    "input_ids": TensorSpec("INT32", is_list=True),
    "tools": TensorSpec("BYTES"),
    "max_tokens": TensorSpec("INT32"),
    "temperature": TensorSpec("FP32"),
    "top_k": TensorSpec("INT32"),
    "top_p": TensorSpec("FP32"),
    "min_p": TensorSpec("FP32"),
    "repetition_penalty": TensorSpec("FP32"),
    "presence_penalty": TensorSpec("FP32"),
    "frequency_penalty": TensorSpec("FP32"),
    "seed": TensorSpec("UINT64"),
    "stop_words": TensorSpec("BYTES", is_list=True),
    "bad_words": TensorSpec("BYTES", is_list=True),
    "end_id": TensorSpec("INT32"),
    "ignore_eos": TensorSpec("BOOL"),
    "stream": TensorSpec("BOOL"),
    "return_log_probs": TensorSpec("BOOL"),
    "exclude_input_in_output": TensorSpec("BOOL"),
    "return_num_input_tokens": TensorSpec("BOOL"),
    "return_num_output_tokens": TensorSpec("BOOL"),
    "return_perf_metrics": TensorSpec("BOOL"),
    "reuse": TensorSpec("BYTES"),
    "allow_special_tokens": TensorSpec("BOOL"),
    "cache_salt": TensorSpec("BYTES"),
    "timeout_ms": TensorSpec("INT32"),
    "priority": TensorSpec("INT32"),
    "cancel_key": TensorSpec("BYTES"),
    "session_id": TensorSpec("BYTES"),
    "session_end": TensorSpec("BOOL"),
}
"""Every input tensor by name; session_id and session_end are for requests over HTTP only."""

TENSOR_NAMES: dict[str, str] = {
    "text": "text_input",
    "echo": "exclude_input_in_output",
}
"""Tensors of the options that have another name."""

PROMPTS = ("text", "messages", "input_ids")
