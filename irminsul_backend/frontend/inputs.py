"""Reading the typed inputs of a request, with errors that name the input."""

from __future__ import annotations

from typing import Any

import numpy as np

from irminsul_backend.errors import InvalidRequestError

MAX_WORDS = 256
"""Most stop words, and most bad words, of one request: each is looked for at every token."""
MAX_WORD_BYTES = 1024

KNOWN_FIELDS = frozenset(
    {
        *("text_input", "messages", "tools", "input_ids", "max_tokens", "stop_words", "bad_words", "top_k", "top_p"),
        *("temperature", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stream"),
        *("end_id", "ignore_eos", "return_log_probs", "exclude_input_in_output", "reuse", "cache_salt", "cancel_key"),
        *("return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics"),
    }
)


class RequestFields:
    """The inputs that a request has, by name: text as str or as UTF-8 bytes, numbers, lists of text, arrays of ids.

    Every method raises InvalidRequestError naming input and value.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        unknown = sorted(values.keys() - KNOWN_FIELDS)
        if unknown:
            raise InvalidRequestError(f"unknown input {unknown[0]!r}; known are {', '.join(sorted(KNOWN_FIELDS))}")
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def size(self, name: str) -> int:
        """Length in bytes of UTF-8; 0 if absent."""
        return _size(self._text(name, self._values[name])) if name in self._values else 0

    def text(self, name: str) -> str | None:
        """UTF-8 text; None if absent."""
        return self._decode(name, self._values[name]) if name in self._values else None

    def words(self, name: str) -> list[str]:
        """A list of UTF-8 texts without the empty ones, which some clients send for "none"."""
        values = self._values.get(name, [])
        if not isinstance(values, (list, tuple)):
            raise InvalidRequestError(f"{name} must be a list of texts, not {type(values).__name__}")
        words = [self._decode(f"{name}[{i}]", value) for i, value in enumerate(values)]
        if len(words) > MAX_WORDS:
            raise InvalidRequestError(f"{name} has {len(words)} entries; at most {MAX_WORDS} are allowed")
        for index, value in enumerate(values):
            if _size(value) > MAX_WORD_BYTES:
                raise InvalidRequestError(
                    f"{name}[{index}] is {_size(value)} bytes long; at most {MAX_WORD_BYTES} are allowed"
                )
        return [word for word in words if word]

    def ids(self, name: str) -> np.ndarray:
        """Token ids as they came, whole numbers [n]; not copied."""
        ids = np.asarray(self._values[name])
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise InvalidRequestError(
                f"{name} has shape {list(ids.shape)} and type {ids.dtype}; it must be one row of whole numbers"
            )
        return ids

    def integer(self, name: str, default: int) -> int:
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise InvalidRequestError(f"{name} is {value!r}; it must be a whole number")
        return int(value)

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
            raise InvalidRequestError(f"{name} is {value!r}; it must be a number")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name, default)
        if not isinstance(value, (bool, np.bool_)):
            raise InvalidRequestError(f"{name} is {value!r}; it must be true or false")
        return bool(value)

    def _text(self, name: str, value: Any) -> bytes | str:
        if not isinstance(value, (bytes, str)):
            raise InvalidRequestError(f"{name} must be text in UTF-8, not {type(value).__name__}")
        return value

    def _decode(self, name: str, value: Any) -> str:
        data = self._text(name, value)
        if isinstance(data, str):
            return data
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(
                f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} ({error.reason})"
            ) from error


def _size(text: bytes | str) -> int:
    return len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
