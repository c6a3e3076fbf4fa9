"""Checks of everything that a request brings, before it costs anything: types, ranges, and that its parts agree.

Prompts usually come from our own chunker, which has checked them; but whatever reaches the engine must not harm it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from reprlib import repr as cut_repr
from typing import Any

import numpy as np

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import BY_NAME, MAX_WORD_BYTES, MAX_WORDS, SAMPLING_INPUTS, Input, SamplingParams

MAX_NAME_BYTES = 4096
"""Of key, session id and namespace, which hold texts of the client's in JSON; those are limited more closely."""
MAX_END_IDS = 2 * MAX_WORDS
MAX_BAD_WORDS = 2 * MAX_WORDS
"""Token sequences of bad words: each word has one for the beginning of a line and one for the middle."""
WHOLE = {"INT32": (-(1 << 31), (1 << 31) - 1), "UINT64": (0, (1 << 64) - 1)}
"""Ranges of the types of whole numbers."""


def check_request(request: GenerationRequest, vocab_size: int) -> None:
    """Raise InvalidRequestError, with field, value and limit, if a field has a wrong type or value."""
    for name in ("key", "session_id", "namespace"):
        _check_text(name, getattr(request, name), MAX_NAME_BYTES)
    if not request.key:
        raise InvalidRequestError("key is empty; it must be a text that no other request has")
    _check_text("echo", request.echo, None)
    _check_text("reuse", request.reuse, MAX_NAME_BYTES)
    BY_NAME["reuse"].check(request.reuse)
    for name in ("timeout_ms", "priority"):
        _check_number(BY_NAME[name], getattr(request, name))
    for name in ("stream", "return_log_probs"):
        if not isinstance(getattr(request, name), bool):
            raise InvalidRequestError(f"{name} is {cut_repr(getattr(request, name))}; it must be true or false")
    if not isinstance(request.sampling, SamplingParams):
        raise InvalidRequestError(f"sampling is {cut_repr(request.sampling)}; it must be the sampling parameters")
    for spec in SAMPLING_INPUTS:
        value = getattr(request.sampling, spec.name)
        if value is not None or spec.default is not None:
            _check_number(spec, value)
    _check_ids("end_ids", request.end_ids, MAX_END_IDS, WHOLE["INT32"][1])
    for i, word in enumerate(_check_list("bad_words", request.bad_words, MAX_BAD_WORDS)):
        _check_ids(f"bad_words[{i}]", word, 2 * MAX_WORD_BYTES, vocab_size - 1)
    for i, text in enumerate(_check_list("stop_words", request.stop_words, MAX_WORDS)):
        _check_text(f"stop_words[{i}]", text, MAX_WORD_BYTES)


def check_prompt(token_ids: Any, chunk_ends: Any, fingerprints: Any, vocab_size: int) -> None:
    """Raise InvalidRequestError if the arrays are not what :meth:`Engine.submit` takes, or contradict each other."""
    arrays = (("token_ids", token_ids, np.int32), ("chunk_ends", chunk_ends, np.int32))
    for name, array, dtype in (*arrays, ("fingerprints", fingerprints, np.uint64)):
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            found = f"{array.dtype}{list(array.shape)}" if isinstance(array, np.ndarray) else type(array).__name__
            raise InvalidRequestError(f"{name} is {found}; it must be one row of {np.dtype(dtype).name}")
    n = len(token_ids)
    if n == 0:
        raise InvalidRequestError("the prompt has no tokens; send at least one")
    agree = len(chunk_ends) == len(fingerprints) and len(chunk_ends) > 0 and chunk_ends[-1] == n
    if not agree or chunk_ends[0] <= 0 or (chunk_ends[1:] <= chunk_ends[:-1]).any():
        raise InvalidRequestError(
            f"{len(chunk_ends)} chunk ends and {len(fingerprints)} fingerprints do not describe {n} tokens"
        )
    if token_ids.min() < 0 or token_ids.max() >= vocab_size:
        raise InvalidRequestError(
            f"token ids span {token_ids.min()}..{token_ids.max()}; they must be 0..{vocab_size - 1}"
        )


def _check_text(name: str, value: Any, limit: int | None) -> None:
    if not isinstance(value, str):
        raise InvalidRequestError(f"{name} is {cut_repr(value)}; it must be text")
    try:
        size = len(value) if value.isascii() else len(value.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} holds half of a surrogate pair at {error.start}; it must be text") from error
    if limit is not None and size > limit:
        raise InvalidRequestError(f"{name} is {size} bytes long; it must have at most {limit}")


def _check_number(spec: Input, value: Any) -> None:
    if spec.dtype == "FP32":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise InvalidRequestError(f"{spec.name} is {cut_repr(value)}; it must be a number")
        if isinstance(value, float) and not math.isfinite(value):
            raise InvalidRequestError(f"{spec.name} is {value}; it must be {spec.limit}")
        if abs(value) > np.finfo(np.float32).max:
            raise InvalidRequestError(f"{spec.name} is {cut_repr(value)}; it must be a 32-bit float")
    else:
        low, high = WHOLE[spec.dtype]
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidRequestError(f"{spec.name} is {cut_repr(value)}; it must be a whole number")
        if not low <= value <= high:
            raise InvalidRequestError(f"{spec.name} is {cut_repr(value)}; it must be between {low} and {high}")
    spec.check(value)


def _check_list(name: str, value: Any, limit: int) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name} is {cut_repr(value)}; it must be a list")
    if len(value) > limit:
        raise InvalidRequestError(f"{name} has {len(value)} entries; at most {limit} are allowed")
    return value


def _check_ids(name: str, value: Any, limit: int, highest: int) -> None:
    for token in _check_list(name, value, limit):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= highest:
            raise InvalidRequestError(f"{name} has the entry {cut_repr(token)}; token ids must be 0..{highest}")
