"""A process's log: lines that name their request, limited in size and rate, as text or as JSON.

A line of text: ``2026-12-07T11:52:00.123Z ERROR irminsul_backend.engine.engine [request=1f0c9a2b44]: sampling failed``.

Request keys and session ids are chosen by clients and may name people. They are logged as short keyed hashes: equal in
all processes of one server, so that its lines can be joined, and meaningless to a reader of the log. Prompts and
outputs are not logged at all.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TextIO

from irminsul_backend.config import ServerConfig

MAX_LINE_BYTES = 2048
"""Longest line of a log; a longer message loses its end, a longer traceback its beginning."""
MAX_ID_CHARACTERS = 64
LINES, LONGEST_WINDOW_S = 10, 10.0
"""One log statement writes at most LINES lines within a window of 1 s; the rest is counted. Each window in which that
happened is followed by one twice as long, up to LONGEST_WINDOW_S."""
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")

_about: ContextVar[tuple[tuple[str, ...], str]] = ContextVar("about", default=((), ""))


@contextlib.contextmanager
def about(*keys: str, session_id: str = "") -> Iterator[None]:
    """While this lasts, lines logged by this thread or task carry these request keys and this session id."""
    token = _about.set((keys, session_id))
    try:
        yield
    finally:
        _about.reset(token)


def set_up_logging(config: ServerConfig, process: str) -> None:
    """Send this process's log to stderr, which the server's log collects. process: its name in JSON lines."""
    handler = LimitedHandler(sys.stderr)
    handler.setFormatter(LineFormatter(config.log_format, config.log_ids, process))
    logging.basicConfig(level=config.log_level, handlers=[handler])


class LineFormatter(logging.Formatter):
    """Makes one line of at most MAX_LINE_BYTES bytes of UTF-8 from a record. Nothing in a message can end its line."""

    def __init__(self, form: str, ids: str, process: str) -> None:
        super().__init__()
        self._make_line = self._json if form == "json" else self._text
        self._name_id = plain_id if ids == "plain" else hashed_id
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        keys, session = getattr(record, "about", ((), ""))
        request = ",".join(map(self._name_id, keys[:8]))
        fields = {"request": cut_end(request, 128), "session": session and self._name_id(session)}
        message = record.getMessage()
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        room = MAX_LINE_BYTES - 256
        while True:  # an escaped character is longer than itself: the line is made again from less
            head = cut_end(message, room // 2 if trace else room)
            line = self._make_line(record, fields, head, cut_start(trace, room - len(head)))
            if len(line.encode()) <= MAX_LINE_BYTES:
                return line
            room = room * 3 // 4

    def _text(self, record: logging.LogRecord, fields: dict[str, str], message: str, trace: str) -> str:
        where = " ".join(f"{name}={value}" for name, value in fields.items() if value)
        head = f"{utc(record.created)} {record.levelname} {record.name}" + (f" [{where}]" if where else "")
        # Indented, the lines of a traceback cannot pass for lines of the log.
        return "\n    ".join([f"{head}: {escape(message)}", *map(escape, trace.splitlines())])

    def _json(self, record: logging.LogRecord, fields: dict[str, str], message: str, trace: str) -> str:
        values = {
            "time": utc(record.created),
            "level": record.levelname,
            "process": self._process,
            "logger": record.name,
            **fields,
            "message": message,
            "exception": trace,
        }
        line = json.dumps({name: value for name, value in values.items() if value}, ensure_ascii=False)
        return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


@dataclass
class _Place:
    """One log statement in the code, and how often it has written of late."""

    began: float
    window_s: float = 1.0
    lines: int = 0
    held: int = 0
    last: logging.LogRecord | None = None
    """The last line that was held back."""


class LimitedHandler(logging.Handler):
    """Writes at most LINES lines a window for each log statement, and then how many more there were.

    Lines are told apart by the statement's place in the code, not by their text, which may differ with each request.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._stream, self._clock = stream, clock
        self._places: dict[tuple[str, int], _Place] = {}
        self._timer: threading.Timer | None = None

    def emit(self, record: logging.LogRecord) -> None:
        record.about = _about.get()
        now = self._clock()
        place = self._places.setdefault((record.pathname, record.lineno), _Place(now))
        if now - place.began >= place.window_s:
            self._begin_window(place)
        place.lines += 1
        if place.lines <= LINES:
            self._write(record)
            return
        # Without exc_info, which would keep the frames of the error alive, and all that they name.
        place.held, place.last = place.held + 1, logging.makeLogRecord({**vars(record), "exc_info": None})
        if self._timer is None:  # the flood may be the last that is ever logged
            self._timer = threading.Timer(LONGEST_WINDOW_S, self.summarise)
            self._timer.daemon = True
            self._timer.start()

    def summarise(self) -> None:
        """Write of every statement how many lines were held back."""
        self.acquire()
        try:
            self._timer = None
            for place in self._places.values():
                if place.held:
                    self._begin_window(place)
        finally:
            self.release()

    def close(self) -> None:
        self.summarise()
        super().close()

    def _begin_window(self, place: _Place) -> None:
        last, held = place.last, place.held
        place.began, place.lines, place.held, place.last = self._clock(), 0, 0, None
        place.window_s = min(2 * place.window_s, LONGEST_WINDOW_S) if held else 1.0
        if last is not None:
            last.msg, last.args = f"… {held:,} more like this, the last: {last.getMessage()}", None
            self._write(last)

    def _write(self, record: logging.LogRecord) -> None:
        try:
            self._stream.write(self.format(record) + "\n")
            self._stream.flush()
        except Exception:
            self.handleError(record)


def utc(seconds: float) -> str:
    """ISO 8601 in UTC with milliseconds, of seconds since the epoch."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03}Z"


def escape(text: str) -> str:
    r"""Write as \n, \x1b or \u2028 what could end or forge a line: control characters, line separators, surrogates."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def cut_end(text: str, limit: int) -> str:
    """At most `limit` characters of the beginning of `text`, with its length where it was cut."""
    if len(text) <= limit:
        return text
    mark = f"… ({len(text):,} characters)"
    return text[: max(0, limit - len(mark))] + mark


def cut_start(text: str, limit: int) -> str:
    """At most `limit` characters of the end of `text`."""
    return text if len(text) <= limit else "…" + text[len(text) - limit + 1 :]


def plain_id(text: str) -> str:
    """The id as it is, on one line and not too long."""
    return cut_end(escape(text), MAX_ID_CHARACTERS)


def hashed_id(text: str) -> str:
    """10 hexadecimal digits that stand for an id in the log of one server."""
    data = text.encode(errors="surrogatepass")
    return hashlib.blake2b(data, key=_server_key(), digest_size=5).hexdigest()


@lru_cache(maxsize=1)
def _server_key() -> bytes:
    """What the processes of one server share and no reader of its log knows: the machine's boot id and their parent."""
    parent = os.getppid()
    parts = [str(parent)]
    with contextlib.suppress(OSError):
        parts.append(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19])  # its start time
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    return hashlib.blake2b(" ".join(parts).encode()).digest()
