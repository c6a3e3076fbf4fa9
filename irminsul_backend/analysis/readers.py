"""Files of prompts in the forms that people have: traces, request logs, plain text. Broken lines are reported."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import zstandard
from irminsul_traffic.traces import Message, TraceError, TraceSession, open_lines, session_from_row

from irminsul_backend.analysis.bodies import KNOWN_ROLES, find_body, parse_body, session_key, user_key
from irminsul_backend.analysis.grouping import SessionGuesser
from irminsul_backend.errors import InvalidRequestError

EXPECTED = (
    'expected one JSON object a line: a session {"session_id", "turns": [{"messages"}]}, or a request body with '
    '"messages" (OpenAI or Anthropic) or "prompt"; or a .txt file with one prompt a line; .gz and .zst of them too'
)
NAME_LENGTH = 32
"""Most characters of a role or field name that a problem quotes."""
CONCURRENT_SESSIONS = 8
"""Sessions of a trace that take turns in a replay."""


@dataclass
class PromptLog:
    """The prompts of one file, as sessions of turns."""

    path: str
    sessions: list[TraceSession] = field(default_factory=list)
    order: list[tuple[int, int]] = field(default_factory=list)
    """(index in `sessions`, turn) of every prompt, in the order of the replay."""
    problems: list[str] = field(default_factory=list)


def read_log(path: str | Path) -> PromptLog:
    """Read a file. Prompts of a request log keep the file's order; the sessions of a trace take turns, eight at once.

    Raises:
        TraceError: the file cannot be opened, or is damaged before its first prompt.
        InvalidRequestError: no line of it has a known form; says what was expected.
    """
    reader = _Reader(Path(path))
    reader.read()
    log = reader.log
    if not log.sessions:
        found = "; ".join(log.problems[:3]) or "it is empty"
        raise InvalidRequestError(f"{path} holds no prompt that can be read ({found}); {EXPECTED}")
    return log


def interleaved(lengths: list[int], width: int = CONCURRENT_SESSIONS) -> Iterator[tuple[int, int]]:
    """(session, turn) in the order of `width` sessions that take turns; one that ends makes room for the next."""
    waiting = iter(range(len(lengths)))
    active = [(session, 0) for session in islice(waiting, width)]
    while active:
        going_on = []
        for session, turn in active:
            yield session, turn
            if turn + 1 < lengths[session]:
                going_on.append((session, turn + 1))
            elif (following := next(waiting, None)) is not None:
                going_on.append((following, 0))
        active = going_on


def shown(name: str) -> str:
    """A name from the file, for a message: quoted, escaped and short, because it may be somebody's text."""
    return repr(name if len(name) <= NAME_LENGTH else name[:NAME_LENGTH] + "...")


class _Reader:
    def __init__(self, path: Path) -> None:
        self.log = PromptLog(str(path))
        self._path = path
        self._is_text = ".txt" in path.suffixes[-2:]
        self._texts: dict[str, str] = {}  # each distinct text is kept once: turns repeat almost all of the former one
        self._turns: dict[str, list[tuple[Message, ...]]] = {}  # by session, of the lines that are requests
        self._arrivals: list[tuple[str, int]] = []
        self._guessers: dict[str, SessionGuesser] = {}  # by user

    def read(self) -> None:
        number = 0
        try:
            with open_lines(self._path, errors="surrogateescape") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        self._read_line(number, line)
        except (zstandard.ZstdError, EOFError, gzip.BadGzipFile, zlib.error) as error:
            self._note(number + 1, f"the compressed data is damaged from here on ({error})")
        except OSError as error:
            raise TraceError(f"{self._path} cannot be read: {error.strerror or error}") from error
        self._finish()

    def _finish(self) -> None:
        log = self.log
        log.order = list(interleaved([len(session.turns) for session in log.sessions]))
        places = {}
        for name, turns in self._turns.items():
            places[name] = len(log.sessions)
            log.sessions.append(TraceSession(name, tuple(turns)))
        log.order += [(places[name], turn) for name, turn in self._arrivals]

    def _note(self, number: int, what: str) -> None:
        self.log.problems.append(f"{self._path}, line {number}: {what}")

    def _read_line(self, number: int, line: str) -> None:
        try:
            self._check_text(line)
            row = self._parse(line)
            if row is None:
                self._add_request(None, None, [{"role": "user", "content": line.strip()}])
            elif "turns" in row:
                self._add_session(number, row)
            else:
                self._add_body(number, row)
        except TraceError as error:
            self.log.problems.append(str(error))
        except InvalidRequestError as error:
            self._note(number, str(error))

    def _parse(self, line: str) -> dict[str, Any] | None:
        """The line's JSON object, or None for a line of plain text."""
        plain = self._is_text and not line.lstrip().startswith("{")
        try:
            row = None if plain else json.loads(line)
        except (ValueError, RecursionError) as error:
            if self._is_text:
                return None
            raise InvalidRequestError(f"not JSON ({error})") from error
        if row is not None and not isinstance(row, dict):
            raise InvalidRequestError(f"a JSON {type(row).__name__}, not an object")
        if "\\ud" in line.lower():  # an escape that may be half of a pair: whole pairs are characters by now
            self._check_text(json.dumps(row, ensure_ascii=False))
        return row

    def _add_session(self, number: int, row: dict[str, Any]) -> None:
        session = session_from_row(row, f"{self._path}, line {number}")
        turns = tuple(self._kept(turn) for turn in session.turns)
        self._report_roles(number, [message for turn in turns for message in turn])
        self.log.sessions.append(TraceSession(session.session_id, turns))

    def _add_body(self, number: int, row: dict[str, Any]) -> None:
        body = find_body(row)
        if body is None:
            fields = ", ".join(shown(name) for name in list(row)[:5]) or "none"
            raise InvalidRequestError(f"neither a session nor a request body; its fields are {fields}")
        notes: dict[str, None] = {}  # in order, each once
        key, user = session_key(row), user_key(row)
        for messages in parse_body(body, lambda what: notes.setdefault(what)):
            self._report_roles(number, messages)
            self._add_request(key, user, messages)
        for what in notes:
            self._note(number, what)

    def _add_request(self, session: str | None, user: str | None, messages: list[Message]) -> None:
        turn = self._kept(messages)
        name = self._guess(user, turn) if session is None else session
        turns = self._turns.setdefault(name, [])
        self._arrivals.append((name, len(turns)))
        turns.append(turn)

    def _guess(self, user: str | None, turn: tuple[Message, ...]) -> str:
        prefix = "" if user is None else f"{user}/"
        return self._guessers.setdefault(prefix, SessionGuesser(prefix)).session_of(turn)

    def _kept(self, messages: tuple[Message, ...] | list[Message]) -> tuple[Message, ...]:
        kept = []
        for message in messages:
            content = message["content"]
            if content not in self._texts:
                self._check_text(content)
                self._texts[content] = content
            kept.append({"role": message["role"], "content": self._texts[content]})
        return tuple(kept)

    def _report_roles(self, number: int, messages: list[Message] | tuple[Message, ...]) -> None:
        for role in dict.fromkeys(m["role"] for m in messages if m["role"] not in KNOWN_ROLES):
            count = sum(m["role"] == role for m in messages)
            self._note(number, f"role {shown(role)} of {count} messages is not known; they were used as they are")

    def _check_text(self, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            code = ord(text[error.start])
            if 0xDC80 <= code <= 0xDCFF:
                raise InvalidRequestError(f"not UTF-8: byte 0x{code - 0xDC00:02x}") from error
            raise InvalidRequestError(f"U+{code:04X} is one half of a surrogate pair") from error
