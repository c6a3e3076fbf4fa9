"""Typed access to the inputs of a request, with errors that name the input."""

from __future__ import annotations

from typing import Any

import numpy as np

from irminsul_backend.errors import InvalidRequestError, shown
from irminsul_backend.request_spec import BY_NAME, INPUTS, MAX_WORD_BYTES, MAX_WORDS

KNOWN = {spec.name: spec for spec in INPUTS if not spec.endpoints_only}


class RequestFields:
    """The inputs of a request, by name: text as str or as UTF-8 bytes, numbers, lists of text, arrays of ids.

    Every method raises InvalidRequestError naming input, value and limit.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        unknown = sorted(values.keys() - KNOWN.keys())
        if unknown:
            raise InvalidRequestError(f"unknown input {shown(unknown[0])}; known are {', '.join(sorted(KNOWN))}")
        self._values = values

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def size(self, name: str) -> int:
        """Return the length of a text in UTF-8 bytes; 0 if the input is absent."""
        return _size(_check_text(name, self._values[name])) if name in self._values else 0

    def get(self, name: str) -> Any:
        """Return the value of a single-valued input, checked against type and range; its default if absent."""
        spec = BY_NAME[name]
        if name not in self._values:
            return spec.default
        value = _READ[spec.dtype](name, self._values[name])
        spec.check(value)
        return value

    def words(self, name: str) -> list[str]:
        """Return a list of texts without the empty ones, which some clients send for "none"."""
        values = self._values.get(name, [])
        if not isinstance(values, (list, tuple)):
            raise InvalidRequestError(f"{name} must be a list of texts, not {type(values).__name__}")
        words = [_read_text(f"{name}[{i}]", value) for i, value in enumerate(values)]
        if len(words) > MAX_WORDS:
            raise InvalidRequestError(f"{name} has {len(words)} entries; at most {MAX_WORDS} are allowed")
        for index, value in enumerate(values):
            if _size(value) > MAX_WORD_BYTES:
                raise InvalidRequestError(
                    f"{name}[{index}] is {_size(value)} bytes long; at most {MAX_WORD_BYTES} are allowed"
                )
        return [word for word in words if word]

    def ids(self, name: str) -> np.ndarray:
        """Return token ids as they were sent, integers [n]; not copied."""
        ids = np.asarray(self._values[name])
        if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
            raise InvalidRequestError(
                f"{name} has shape {list(ids.shape)} and type {ids.dtype}; it must be one row of whole numbers"
            )
        return ids


def _read_integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be a whole number")
    return int(value)


def _read_number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be a number")
    return float(value)


def _read_flag(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidRequestError(f"{name} is {shown(value)}; it must be true or false")
    return bool(value)


def _read_text(name: str, value: Any) -> str:
    data = _check_text(name, value)
    if isinstance(data, str):
        return data
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidRequestError(
            f"{name} is not valid UTF-8: byte 0x{data[error.start]:02x} at offset {error.start} ({error.reason})"
        ) from error


_READ = {
    "STRING": _read_text,
    "INT32": _read_integer,
    "UINT64": _read_integer,
    "FP32": _read_number,
    "BOOL": _read_flag,
}


def _check_text(name: str, value: Any) -> bytes | str:
    if not isinstance(value, (bytes, str)):
        raise InvalidRequestError(f"{name} must be text in UTF-8, not {type(value).__name__}")
    return value


def _size(text: bytes | str) -> int:
    return len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
