"""Sessions on a real server: flags, ids of every kind, and what happens when they are wrong."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from irminsul_backend.config import ServerConfig
from irminsul_backend.triton_io.server.launcher import Server, running_server

pytestmark = pytest.mark.server

IDLE_LIMIT = 1.5
TURN = {"text_input": "one turn of an agent", "max_tokens": 2, "ignore_eos": True}


@pytest.fixture
def session() -> str:
    return f"session-{uuid.uuid4()}"


class TestFlags:
    def test_a_session_has_turns(self, stream: Any, session: str) -> None:
        for start, end in ((True, False), (False, False), (False, True)):
            answer = stream.ask(session=session, start=start, end=end, **TURN)
            assert not answer.error
            assert len(answer.joined("output_ids")) == 2

    def test_a_second_start_is_refused_and_the_session_lives_on(self, stream: Any, session: str) -> None:
        assert not stream.ask(session=session, start=True, end=False, **TURN).error
        assert "already open" in stream.ask(session=session, start=True, end=False, **TURN).error
        assert not stream.ask(session=session, start=False, end=True, **TURN).error

    def test_a_turn_of_a_session_nobody_opened_is_refused(self, stream: Any, session: str) -> None:
        assert "START" in stream.ask(session=session, start=False, end=False, **TURN).error

    def test_an_ended_session_can_be_opened_again(self, stream: Any, session: str) -> None:
        for _ in range(2):
            assert not stream.ask(session=session, start=True, end=False, **TURN).error
            assert not stream.ask(session=session, start=False, end=True, **TURN).error
        assert "START" in stream.ask(session=session, start=False, end=False, **TURN).error

    def test_a_bad_first_request_does_not_lose_the_session(self, stream: Any, session: str) -> None:
        assert "empty" in stream.ask(session=session, start=True, end=False, text_input="").error
        assert not stream.ask(session=session, start=False, end=True, **TURN).error

    def test_a_bad_last_request_ends_the_session(self, stream: Any, session: str) -> None:
        assert not stream.ask(session=session, start=True, end=False, **TURN).error
        assert "empty" in stream.ask(session=session, start=False, end=True, text_input="").error
        assert not stream.ask(session=session, start=True, end=True, **TURN).error

    def test_end_right_behind_queued_turns_loses_none(self, stream: Any, session: str) -> None:
        ids = [stream.send(session=session, start=n == 0, end=n == 5, **TURN) for n in range(6)]
        assert [len(answer.joined("output_ids")) for answer in stream.answers(ids)] == [2] * 6


class TestIds:
    @pytest.mark.parametrize(
        "session_id",
        ["agent-7/α", "x" * 128, "0", "18446744073709551616", 1, 2**63 - 1, 'a b\n"quoted" {json}'],
        ids=["non-ascii", "128-bytes", "text-zero", "over-uint64", "one", "largest-integer", "punctuation"],
    )
    def test_the_same_id_at_each_step(self, stream: Any, session_id: int | str) -> None:
        """The chunker keeps the session by it, and the engine keeps rows by it where no salt is given."""
        for start, end in ((True, False), (False, True)):
            assert not stream.ask(session=session_id, start=start, end=end, **TURN).error
        refused = stream.ask(session=session_id, start=False, end=False, **TURN).error
        assert "START" in refused

    def test_an_id_over_128_bytes_is_refused(self, stream: Any) -> None:
        for session_id in ("x" * 129, "α" * 65):
            assert "128" in stream.ask(session=session_id, **TURN).error

    def test_a_request_needs_no_id(self, stream: Any) -> None:
        assert len(stream.ask(session=None, **TURN).joined("output_ids")) == 2


class TestManySessions:
    def test_sessions_that_nobody_ends_keep_no_request_waiting(self, stream: Any) -> None:
        """16,500 of them; a refused START opens its session, too, and costs the least."""
        for begin in range(1, 16_501, 500):
            ids = [stream.send(session=n, start=True, end=False, input_ids=[]) for n in range(begin, begin + 500)]
            assert all("empty" in error for error in stream.refusals(ids))
        for session in ("new", 2**40, None):
            assert not stream.ask(session=session, start=True, end=False, **TURN).error
        assert not stream.ask(session=1, start=False, end=False, **TURN).error


@pytest.fixture(scope="module")
def strict_server() -> Iterator[Server]:
    config = ServerConfig(log_level="WARNING", threads=1, session_ttl_s=IDLE_LIMIT, require_cache_salt=True)
    with running_server(config) as server:
        yield server


class TestStrictServer:
    """A server with a short idle limit that shares rows within a session only."""

    def test_a_late_turn_is_told_and_the_session_can_be_opened_again(
        self, strict_server: Server, connect: Any, session: str
    ) -> None:
        stream = connect(strict_server)
        assert not stream.ask(session=session, start=True, end=False, **TURN).error
        time.sleep(2 * IDLE_LIMIT)
        late = stream.ask(session=session, start=False, end=False, **TURN).error
        assert "unknown or expired" in late
        assert str(IDLE_LIMIT) in late
        assert not stream.ask(session=session, start=True, end=True, **TURN).error

    def test_the_engine_sees_the_same_session_ids(self, strict_server: Server, connect: Any) -> None:
        """Rows are kept by session here: two ids that look alike share none, and none outlives its session."""
        stream = connect(strict_server)

        def computed(session: int | str, start: bool = False, end: bool = False) -> int:
            answer = stream.ask(session=session, start=start, end=end, text_input="word " * 200, max_tokens=1)
            return int(json.loads(answer.responses[-1]["usage"])["computed_tokens"])

        alike = [("agent-7/α", "agent-7/β"), ("x" * 127, "x" * 128), (2**63 - 1, str(2**63 - 1)), (77, "77")]
        for pair in alike:
            first = [computed(session, start=True) for session in pair]
            again = [computed(session, end=True) for session in pair]
            after = [computed(session, start=True, end=True) for session in pair]
            assert again == [1, 1]
            assert first == after == [first[0]] * 2 != again
