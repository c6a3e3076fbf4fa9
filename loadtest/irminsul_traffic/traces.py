"""Recorded agent sessions: reading trace files, one session a line.

A line is ``{"session_id": str, "turns": [{"messages": [{"role": str, "content": str, ...}, ...]}, ...]}``; each turn
is the whole prompt of that step. ``.jsonl``, ``.jsonl.gz`` and ``.jsonl.zst`` are read as streams.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import zstandard

ZSTD_WINDOW = 2**27
"""Bytes; traces repeat themselves at long distances and are compressed with a window of this size."""

Message = dict[str, Any]
"""``role`` and ``content`` (both str), and whatever else the trace holds."""


class TraceError(Exception):
    """A trace file cannot be read; the message names the file, the line and what is wrong there."""


@dataclass(frozen=True)
class TraceSession:
    """One recorded session."""

    session_id: str
    turns: tuple[tuple[Message, ...], ...]
    """The messages of each turn; at least one turn, and at least one message in each."""


def read_trace(path: str | Path) -> Iterator[TraceSession]:
    """Yield the sessions of a file in order. Raises TraceError naming file, line and what is wrong there."""
    path = Path(path)
    number = 0
    try:
        with open_lines(path) as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield parse_session(line, f"{path}, line {number}")
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (zstandard.ZstdError, EOFError) as error:
        raise TraceError(f"{path}, after line {number}: the compressed data is damaged ({error})") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path}, after line {number}: the text is not UTF-8 ({error})") from error


def open_lines(path: Path, errors: str = "strict") -> TextIO:
    """The text of a plain, ``.gz`` or ``.zst`` file, line by line; `errors` as in `open`."""
    if path.name.endswith(".zst"):
        return io.TextIOWrapper(io.BufferedReader(_ZstdFile(path)), encoding="utf-8-sig", errors=errors, newline="\n")
    if path.name.endswith(".gz"):
        return gzip.open(path, "rt", encoding="utf-8-sig", errors=errors, newline="\n")
    return path.open(encoding="utf-8-sig", errors=errors, newline="\n")


class _ZstdFile(io.RawIOBase):
    """The decompressed bytes of a file. Unlike zstandard's own reader it raises EOFError for one that was cut short."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("rb")
        self._frame = self._new_frame()
        self._ready = b""

    @staticmethod
    def _new_frame() -> zstandard.ZstdDecompressionObj:
        return zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW).decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            data = self._raw.read(1 << 16)
            if not data:
                if not self._frame.eof:
                    raise EOFError("the file ends too early")
                return 0
            while data:
                if self._frame.eof:
                    self._frame = self._new_frame()
                self._ready += self._frame.decompress(data)
                data = self._frame.unused_data
        size = min(len(buffer), len(self._ready))
        buffer[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size

    def close(self) -> None:
        self._raw.close()
        super().close()


def parse_session(line: str, where: str) -> TraceSession:
    """One line's session; ``where`` starts the message of the TraceError that is raised if it has another form."""
    try:
        row = json.loads(line)
    except ValueError as error:
        raise TraceError(f"{where}: not JSON ({error})") from error
    return session_from_row(row, where)


def session_from_row(row: Any, where: str) -> TraceSession:
    """As `parse_session`, for a line whose JSON is already read."""
    if not isinstance(row, dict):
        raise TraceError(f"{where}: not an object with session_id and turns")
    session_id, turns = row.get("session_id"), row.get("turns")
    if not (isinstance(session_id, str) and session_id):
        found = "empty or missing" if session_id in (None, "") else f"of type {type(session_id).__name__}"
        raise TraceError(f"{where}: session_id is {found}; it must be a text")
    if not (isinstance(turns, list) and turns):
        raise TraceError(f"{where}: turns must be a list with at least one turn")
    return TraceSession(session_id, tuple(_messages(turn, f"{where}: turn {t}") for t, turn in enumerate(turns)))


def _messages(turn: Any, where: str) -> tuple[Message, ...]:
    messages = turn.get("messages") if isinstance(turn, dict) else None
    if not (isinstance(messages, list) and messages):
        raise TraceError(f"{where}: messages must be a list with at least one message")
    for m, message in enumerate(messages):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, dict) else None
            if not isinstance(value, str):
                # What it holds is somebody's prompt: the type says enough.
                found = "None" if value is None else f"of type {type(value).__name__}"
                raise TraceError(f"{where}, message {m}: {key} is {found}; it must be a text")
    return tuple(messages)
