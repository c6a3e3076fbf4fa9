"""The gRPC client against a real gRPC server that keeps Triton's session rules."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from irminsul_client import (
    Client,
    InvalidRequest,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    SessionExpired,
)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the server never got there"
        time.sleep(0.005)


@pytest.fixture
def client(ensemble: Any) -> Any:
    with Client(ensemble.address) as client:
        yield client


class TestStream:
    def test_chunks_carry_text_ids_and_the_last_one_usage(self, client: Client) -> None:
        chunks = list(client.stream(text="one three seven"))
        assert [c.text for c in chunks] == ["one ", "three ", "seven ", ""]
        assert [c.token_ids for c in chunks] == [(3,), (5,), (5,), ()]
        assert [c.index for c in chunks] == [2, 3, 4, 5]
        assert [c.finish_reason for c in chunks] == ["", "", "", "length"]
        assert [c.usage is None for c in chunks] == [True, True, True, False]
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.segment_map == ((2, 3, -5),)
        assert (usage.exact_tokens, usage.shifted_tokens, usage.computed_tokens, usage.prompt_tokens) == (2, 3, 4, 9)

    def test_completion_joins_the_stream_and_counts_gaps(self, client: Client) -> None:
        answer = client.generate(text="a bb ccc dddd")
        assert answer.text == "a bb ccc dddd "
        assert answer.token_ids == (1, 2, 3, 4)
        assert answer.finish_reason == "length"
        assert len(answer.inter_token_ms) == 3
        assert 0 < answer.ttft_ms <= answer.total_ms

    def test_closing_the_iterator_cancels_that_request_only(self, client: Client, ensemble: Any) -> None:
        ensemble.hold.clear()
        dropped = client.stream(text="x1 x2 x3")
        kept = client.stream(text="y1 y2 y3")
        assert next(dropped).text == "x1 "
        assert next(kept).text == "y1 "
        dropped.close()
        wait_until(lambda: ensemble.seen[0].cancelled)
        ensemble.hold.set()
        assert "".join(c.text for c in kept) == "y2 y3 "
        assert not ensemble.seen[1].cancelled

    def test_many_sessions_run_at_once_on_one_client(self, client: Client, ensemble: Any) -> None:
        ensemble.hold.clear()
        streams = [client.session(f"s{i}").stream(text=f"w{i} end") for i in range(16)]
        assert [next(s).text for s in streams] == [f"w{i} " for i in range(16)]
        assert ensemble.most_running == 16
        ensemble.hold.set()
        assert ["".join(c.text for c in s) for s in streams] == ["end "] * 16

    def test_timeout_cancels_on_the_server(self, client: Client, ensemble: Any) -> None:
        ensemble.hold.clear()
        with pytest.raises(RequestTimeout, match=r"0\.2 s"):
            client.generate(text="slow answer", timeout=0.2)
        wait_until(lambda: ensemble.seen[0].cancelled)

    def test_closing_the_client_ends_running_streams(self, ensemble: Any) -> None:
        ensemble.hold.clear()
        client = Client(ensemble.address)
        stream = client.stream(text="never ends")
        next(stream)
        threading.Timer(0.1, client.close).start()
        with pytest.raises(RequestCancelled):
            list(stream)
        with pytest.raises(RequestCancelled, match="closed"):
            client.generate(text="later")

    def test_a_stream_that_just_ends_is_an_error(self, client: Client) -> None:
        with pytest.raises(ServerError, match="before the answer was complete"):
            client.generate(text="vanish")

    def test_an_invalid_request_says_what_the_server_said(self, client: Client) -> None:
        with pytest.raises(InvalidRequest, match="max_tokens is 0"):
            client.generate(text="invalid")

    def test_bad_arguments_fail_before_anything_is_sent(self, client: Client, ensemble: Any) -> None:
        with pytest.raises(InvalidRequest, match="exactly one of"):
            client.stream(text="a", input_ids=[1])
        with pytest.raises(TypeError, match="max_token'"):
            client.stream(text="a", max_token=3)  # type: ignore[call-arg]
        assert ensemble.seen == []

    def test_unreachable_server_and_unknown_model(self, ensemble: Any) -> None:
        with Client("127.0.0.1:1") as client, pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
            client.generate(text="a")
        with Client(ensemble.address, model="other") as client, pytest.raises(ServerUnavailable, match="'other'"):
            client.check_ready()


class TestSession:
    def test_start_on_the_first_request_end_on_close(self, client: Client, ensemble: Any) -> None:
        with client.session("agent-7/α", cache_salt="team") as session:
            session.generate(text="one")
            session.generate(text="two")
        flags = [(s.session_id, s.start, s.end) for s in ensemble.seen]
        assert flags == [("agent-7/α", True, False), ("agent-7/α", False, False), ("agent-7/α", False, True)]
        assert ensemble.open_sessions == set()
        assert ensemble.seen[0].inputs["cache_salt"] == ("BYTES", [1, 1], b"\x04\x00\x00\x00team")

    @pytest.mark.parametrize("id", ["0", "18446744073709551616", "é" * 64, "agent-7/α"])
    def test_ids_arrive_as_they_are(self, client: Client, ensemble: Any, id: str) -> None:
        client.session(id).generate(text="x", end=True)
        assert [(s.session_id, s.start, s.end) for s in ensemble.seen] == [(id, True, True)]

    def test_end_with_the_last_request_needs_no_close(self, client: Client, ensemble: Any) -> None:
        with client.session() as session:
            session.generate(text="one")
            session.generate(text="two", end=True)
        assert [(s.start, s.end) for s in ensemble.seen] == [(True, False), (False, True)]

    def test_one_shot_requests_start_and_end_fresh_sessions(self, client: Client, ensemble: Any) -> None:
        client.generate(text="one")
        client.generate(text="two")
        assert [(s.start, s.end) for s in ensemble.seen] == [(True, True)] * 2
        assert ensemble.seen[0].session_id != ensemble.seen[1].session_id

    @pytest.mark.parametrize(
        "message",
        [
            "sequence id must specify the START flag on the first request of the sequence",
            "session 'a' is unknown or expired (idle limit 600 s); send the request again with the START flag",
        ],
    )
    def test_a_forgotten_session_is_opened_again(self, client: Client, ensemble: Any, message: str) -> None:
        ensemble.expired_message = message
        with client.session("a") as session:
            session.generate(text="one")
            ensemble.open_sessions.clear()
            assert session.generate(text="two words").text == "two words "
            session.generate(text="three")
        assert [s.start for s in ensemble.seen] == [True, False, True, False, False]

    def test_an_open_session_is_joined(self, client: Client, ensemble: Any) -> None:
        ensemble.open_sessions.add("shared")
        with client.session("shared") as session:
            assert session.generate(text="hello").text == "hello "
        assert [(s.start, s.end) for s in ensemble.seen] == [(True, False), (False, False), (False, True)]

    def test_a_refused_restart_is_reported_once(self, client: Client, ensemble: Any) -> None:
        session = client.session("a")
        session.generate(text="one")
        ensemble.open_sessions.clear()
        ensemble._answer = lambda seen, context: iter([ensemble._error(seen, ensemble.expired_message)])
        with pytest.raises(SessionExpired):
            session.generate(text="two")
        assert len(ensemble.seen) == 3

    def test_an_invalid_request_leaves_the_session_open(self, client: Client, ensemble: Any) -> None:
        session = client.session("a")
        with pytest.raises(InvalidRequest):
            session.generate(text="invalid")
        session.generate(text="fine")
        assert [s.start for s in ensemble.seen] == [True, False]

    def test_an_empty_id_is_refused(self, client: Client) -> None:
        with pytest.raises(InvalidRequest, match="must not be empty"):
            client.session("")
