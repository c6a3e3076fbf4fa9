"""The table of open sessions, with the last prompt of each."""

from __future__ import annotations

import json
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

import numpy as np

from irminsul_backend.errors import SessionError, shown
from irminsul_backend.request_spec import MAX_SESSION_ID_BYTES

SessionId = int | str
"""A Triton correlation id. A number and the same digits as text are two sessions."""


class CutPrompt(NamedTuple):
    """A prompt and its chunk ends, from which the session's next prompt is cut incrementally."""

    ids: np.ndarray
    """int32 [n]."""
    edges: np.ndarray
    """int32 [k]."""
    ends: np.ndarray
    """int32 [m]."""

    @property
    def nbytes(self) -> int:
        """Size of the arrays in bytes."""
        return self.ids.nbytes + self.edges.nbytes + self.ends.nbytes


class Turn(NamedTuple):
    """What a request finds in its session."""

    session_key: str
    """The session's name as text, of which no two ids have the same."""
    opening: str
    """Random, another one each time a session is opened; a request without a session has its own."""
    previous: CutPrompt | None
    """The session's last prompt, if there is one."""


def _random_name() -> str:
    return uuid.uuid4().hex


@dataclass
class _Session:
    last_used: float
    opening: str = field(default_factory=_random_name)
    prompt: CutPrompt | None = None


class SessionTable:
    """Sessions by id, least recently used first. All methods may be called from any thread.

    Triton's sequence batcher takes no part in this: when its slots are full it lets every further request wait, for as
    long as its own idle limit. This table never waits. It evicts a session after `ttl_s` seconds without a request; the
    one idle for longest when there are more than `max_sessions`; and the oldest prompts (not their sessions) when all
    prompts together exceed `max_prompt_bytes`.
    """

    def __init__(
        self,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
        max_sessions: int = 100_000,
        max_prompt_bytes: int = 1 << 26,
    ) -> None:
        self._ttl_s = ttl_s
        self._clock = clock
        self._max_sessions = max_sessions
        self._max_prompt_bytes = max_prompt_bytes
        self._sessions: OrderedDict[SessionId, _Session] = OrderedDict()
        self._prompts: OrderedDict[SessionId, int] = OrderedDict()
        """Size in bytes of each remembered prompt, oldest first."""
        self._lock = Lock()
        self.prompt_bytes = 0
        """Size in bytes of all remembered prompts."""

    def __len__(self) -> int:
        return len(self._sessions)

    def enter(self, session_id: SessionId | None, start: bool | None, end: bool) -> Turn:
        """Admit a request to its session and apply its flags, before anything else in it is checked.

        START opens the session even if the request is refused later; END closes it in any case. Without either (`start`
        is None) the request opens the session if it is not open. A request without a
        session (None) is always admitted and leaves nothing here.

        Raises:
            SessionError: the id is empty or too long; START on an open session; no START on one that is not open.
        """
        if session_id is None:
            opening = _random_name()
            return Turn(opening, opening, None)
        check_session_id(session_id)
        with self._lock:
            now = self._clock()
            self._expire(now)
            session = self._sessions.get(session_id)
            try:
                if session is None and start is False:
                    raise SessionError(
                        f"session {session_id!r} is unknown or expired (idle limit {self._ttl_s:g} s); "
                        "send the request again with the START flag"
                    )
                if session is not None and start:
                    raise SessionError(
                        f"session {session_id!r} is already open (last used {now - session.last_used:.1f} s ago, "
                        f"idle limit {self._ttl_s:g} s); send the request without the START flag, "
                        "or end the session first"
                    )
                if session is None:
                    session = self._sessions[session_id] = _Session(now)
                session.last_used = now
                self._sessions.move_to_end(session_id)
                while len(self._sessions) > self._max_sessions:
                    self._close(next(iter(self._sessions)))
                return Turn(json.dumps(session_id, ensure_ascii=False), session.opening, session.prompt)
            finally:
                if end:
                    self._close(session_id)

    def remember(self, session_id: SessionId | None, prompt: CutPrompt) -> None:
        """Keep `prompt` as the session's last one; does nothing if the session has been closed."""
        if session_id is None:
            return
        with self._lock:
            session = self._sessions.get(session_id)
            if session is None or prompt.nbytes > self._max_prompt_bytes:
                return
            self._forget_prompt(session_id)
            session.prompt = prompt
            self._prompts[session_id] = prompt.nbytes
            self.prompt_bytes += prompt.nbytes
            while self.prompt_bytes > self._max_prompt_bytes:
                self._forget_prompt(next(iter(self._prompts)))

    def _expire(self, now: float) -> None:
        while self._sessions:
            oldest = next(iter(self._sessions))
            if now - self._sessions[oldest].last_used <= self._ttl_s:
                return
            self._close(oldest)

    def _close(self, session_id: SessionId) -> None:
        self._forget_prompt(session_id)
        self._sessions.pop(session_id, None)

    def _forget_prompt(self, session_id: SessionId) -> None:
        self.prompt_bytes -= self._prompts.pop(session_id, 0)
        if session_id in self._sessions:
            self._sessions[session_id].prompt = None


def check_session_id(session_id: SessionId) -> None:
    """Raise SessionError if the id is an empty text or longer than MAX_SESSION_ID_BYTES in UTF-8."""
    if isinstance(session_id, int):
        return
    size = len(session_id.encode("utf-8", "surrogatepass"))
    if not size:
        raise SessionError("the session id is empty; send a non-empty sequence id (a number other than 0, or text)")
    if size > MAX_SESSION_ID_BYTES:
        raise SessionError(
            f"the session id is {size} bytes long, at most {MAX_SESSION_ID_BYTES} are allowed; "
            f"it begins with {shown(session_id, 32)}"
        )
