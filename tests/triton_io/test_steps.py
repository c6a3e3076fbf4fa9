"""The ensemble's three steps without Triton: what a client receives, and what the engine is told, when things fail."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from fake_engine import finished, opened, sealed_event, sealed_packet, tokens

from irminsul_backend.config import ServerConfig
from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.frontend.chunker import PromptPreparer
from irminsul_backend.frontend.replies import TranscriptTable
from irminsul_backend.protocol import Event, GenerationRequest
from irminsul_backend.triton_io.events import pack_event
from irminsul_backend.triton_io.sealing import unseal
from irminsul_backend.triton_io.tensors import CONTROL_INPUT, EVENT_TENSORS, PLAN_TENSORS

START, END = 1, 2


class TestChunker:
    @pytest.fixture
    def chunker(self, border: Any) -> Iterator[Any]:
        chunker = border("steps").ChunkerModel(PromptPreparer(ServerConfig()))
        yield chunker
        chunker.finalize()

    @pytest.mark.parametrize(("session", "key"), [(7, "7"), ("7", '"7"'), ("agent-7/α", '"agent-7/α"')])
    def test_a_plan(self, chunker: Any, make_request: Any, backend_utils: Any, session: int | str, key: str) -> None:
        request = make_request(session, START | END, text_input="hello there", max_tokens=3)
        chunker.execute([request])
        (response,) = request.sender.wait()
        outputs = opened(PLAN_TENSORS, response)
        packed = GenerationRequest.unpack(outputs["request"])
        assert (packed.session_id, packed.sampling.max_tokens) == (key, 3)
        assert outputs["chunk_ends"][-1] == len(outputs["token_ids"]) > 0
        assert len(outputs["fingerprints"]) == len(outputs["chunk_ends"])

    def test_a_request_needs_no_session(self, chunker: Any, make_request: Any, backend_utils: Any) -> None:
        requests = [make_request(0, 0, text_input="x") for _ in range(2)]
        chunker.execute(requests)
        plans = [opened(PLAN_TENSORS, request.sender.wait()[0]) for request in requests]
        one, other = (GenerationRequest.unpack(plan["request"]).session_id for plan in plans)
        assert one != other

    def test_the_input_session_id_opens_a_session_and_session_end_ends_it(
        self, chunker: Any, make_request: Any
    ) -> None:
        def ask(session: int | str = 0, flags: int = 0, **inputs: Any) -> str:
            request = make_request(session, flags, text_input="x", **inputs)
            chunker.execute([request])
            return "".join(request.sender.errors())

        assert [ask(session_id="s") for _ in range(2)] == ["", ""]
        assert "already open" in ask("s", START), "it is the session that a correlation id names"
        assert ask("s", 0) == ""
        assert ask("another", START, session_id="s", session_end=True) == "", "the input comes first"
        assert "unknown or expired" in ask("s", 0)
        assert "unknown or expired" in ask("another", 0)

    @pytest.mark.parametrize(
        ("session", "words"),
        [
            (b"a\xff", "session_id is not UTF-8: byte 1 is 0xff"),
            ("", "session_id is empty; leave it out"),
            ("x" * 129, "at most 128"),
        ],
    )
    def test_a_bad_session_id_is_refused(self, session: Any, words: str, chunker: Any, make_request: Any) -> None:
        request = make_request(text_input="x", session_id=session)
        chunker.execute([request])
        assert words in request.sender.errors()[0]

    def test_outputs_that_nobody_asked_for_are_held_while_they_are_dropped(
        self, chunker: Any, make_request: Any, backend_utils: Any
    ) -> None:
        request = make_request(text_input="x", outputs=["request"])
        chunker.execute([request])
        assert list(backend_utils.outputs(request.sender.wait()[0])) == ["request"]

    def test_a_large_plan_that_cannot_be_sent_becomes_an_error(
        self, chunker: Any, make_request: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(sys.modules["irminsul_backend.triton_io.steps"], "LARGE_BYTES", 10)
        request = make_request(text_input="x")
        request.sender.failures = [RuntimeError("no shared memory")]
        chunker.execute([request])
        assert request.sender.errors() == ["RuntimeError: no shared memory"]

    def test_a_bad_request_fails_alone(self, chunker: Any, make_request: Any) -> None:
        bad, good = make_request("a", START | END, text_input=""), make_request("b", START | END, text_input="x")
        chunker.execute([bad, good])
        assert "empty" in bad.sender.errors()[0]
        assert not good.sender.errors()

    def test_turns_of_one_session_are_sent_in_order(self, chunker: Any, make_request: Any) -> None:
        """The large turn is prepared first although small ones wait; other sessions do not."""
        order: list[str] = []
        large = "word " * 40_000
        turns = [make_request("s", START * (n == 0), text_input=large if n == 0 else "x") for n in range(3)]
        other = make_request("t", START | END, text_input="x")
        for name, request in zip(("0", "1", "2", "other"), [*turns, other], strict=True):
            note = request.sender.ended.set
            request.sender.ended.set = lambda note=note, name=name: (order.append(name), note())
        chunker.execute([*turns, other])
        assert not any(error for request in (*turns, other) for error in request.sender.errors())
        assert [name for name in order if name != "other"] == ["0", "1", "2"]
        assert order[0] == "other"

    def test_the_flags_of_a_batch_count_as_those_of_any_bad_request(
        self, chunker: Any, make_request: Any, backend_utils: Any
    ) -> None:
        def ask(flags: int, rows: int = 1) -> str:
            request = make_request("s", flags, max_tokens=1)
            text = backend_utils.Tensor("text_input", np.array([[b"x"]] * rows, np.object_))
            request.inputs().append(text)
            chunker.execute([request])
            return "".join(request.sender.errors())

        assert "shape [2, 1]" in ask(START, rows=2)
        assert ask(0) == ""
        assert "already open" in ask(START)
        assert "shape [2, 1]" in ask(END, rows=2)
        assert "unknown or expired" in ask(0)

    def test_a_defect_is_one_requests_error_and_logged(
        self, border: Any, make_request: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        class Broken:
            def prepare(self, *_: Any) -> Any:
                raise KeyError("defect")

        chunker = border("steps").ChunkerModel(Broken())
        request = make_request("a", START, text_input="x")
        chunker.execute([request])
        assert request.sender.errors() == ["KeyError: 'defect'"]
        assert "KeyError" in caplog.text
        chunker.finalize()

    def test_a_send_that_fails_loses_no_other_request(
        self, chunker: Any, make_request: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        lost, good = make_request("a", START | END, text_input="x"), make_request("b", START | END, text_input="x")
        lost.sender.failures.append(RuntimeError("no shared memory"))
        chunker.execute([lost])
        chunker.execute([good])
        assert not good.sender.errors()
        chunker.finalize()
        assert "no shared memory" in caplog.text

    def test_what_waits_at_the_end_is_told(self, border: Any, make_request: Any) -> None:
        class Slow:
            begun, go = threading.Event(), threading.Event()

            def prepare(self, *_: Any) -> Any:
                self.begun.set()
                assert self.go.wait(10)
                raise InvalidRequestError("slow")

        slow = Slow()
        chunker = border("steps").ChunkerModel(slow)
        requests = [make_request("s", START * (n == 0), text_input="x") for n in range(3)]
        chunker.execute(requests)
        assert slow.begun.wait(10)
        threading.Timer(0.05, slow.go.set).start()
        chunker.finalize()
        assert requests[0].sender.errors() == ["slow"]
        assert [request.sender.errors() for request in requests[1:]] == [["the server is shutting down"]] * 2

    def test_too_many_bytes_are_refused_at_once(self, border: Any, make_request: Any) -> None:
        class Slow:
            go = threading.Event()

            def prepare(self, *_: Any) -> Any:
                assert self.go.wait(10)
                raise InvalidRequestError("slow")

        chunker = border("steps").ChunkerModel(Slow(), max_waiting_bytes=1000)
        first, second = (make_request(0, 0, text_input="x" * 600) for _ in range(2))
        chunker.execute([first, second])
        assert "at most 4096 and 1000 bytes may; send the request again in 1 s" in second.sender.errors()[0]
        Slow.go.set()
        assert first.sender.errors() == ["slow"]
        chunker.finalize()


class Letters:
    """A detokenizer: id 1 is "a", 2 "b" …; "c" is a stop word."""

    def __init__(self, request: GenerationRequest) -> None:
        self.stopped = False

    def push(self, ids: Any) -> str:
        text = "".join(chr(96 + i) for i in ids)
        self.stopped = "c" in text
        return text.partition("c")[0]

    def finish(self) -> str:
        return ""


class TestDetokenizer:
    @pytest.fixture
    def told(self, backend_utils: Any, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
        """The commands that reach the engine."""
        commands: list[dict[str, Any]] = []

        def engine(request: Any) -> list[Any]:
            assert request.model_name == "irminsul_engine"
            (tensor,) = request.inputs()
            packet = {CONTROL_INPUT.name: tensor.as_numpy().item()}
            commands.append(json.loads(unseal((CONTROL_INPUT,), packet)[CONTROL_INPUT.name]))
            if commands[-1]["stop"] == "refused":
                return [backend_utils.InferenceResponse(error=backend_utils.TritonError("the engine is closed"))]
            if commands[-1]["stop"] == "broken":
                raise RuntimeError("the pipe is broken")
            return [backend_utils.InferenceResponse([])]

        monkeypatch.setattr(backend_utils, "bls", engine)
        return commands

    @pytest.fixture
    def model(self, told: Any, border: Any) -> Iterator[Any]:
        one = border("steps").DetokenizerModel(TranscriptTable(Letters, ask_every_s=0))
        yield one
        one.finalize()

    @pytest.fixture
    def feed(self, model: Any, make_request: Any) -> Callable[..., Any]:
        def one(event: Event, cancelled: bool = False, failures: Sequence[Exception] = ()) -> Any:
            request = make_request(**sealed_event(event))
            request.sender.cancelled = cancelled
            request.sender.failures = list(failures)
            model.execute([request])
            return request.sender

        return one

    def admitted(self, key: str = "a", stream: bool = True) -> Event:
        return Event(key, 0, "admitted", request=GenerationRequest(key, stream=stream))

    def test_a_stream(self, feed: Any, model: Any, told: list[Any], backend_utils: Any) -> None:
        events = [self.admitted(), tokens(1, 2, index=1), finished(index=2)]
        replies = [backend_utils.outputs(response) for event in events for response in feed(event).wait()]
        assert "".join(reply["text_output"] for reply in replies) == "ab"
        assert [reply["finish_reason"] for reply in replies] == ["", "", "length"]
        model.finalize()
        assert told == []

    def test_silence_is_a_final_without_a_response(self, feed: Any, backend_utils: Any) -> None:
        silent = [self.admitted(stream=False), tokens(1, index=1), tokens(2, index=2)]
        assert [feed(event).wait() for event in silent] == [[], [], []]
        (response,) = feed(finished(index=3)).wait()
        assert backend_utils.outputs(response)["text_output"] == "ab"

    def test_the_engine_is_told_once_of_a_stop_word(self, feed: Any, model: Any, told: list[Any]) -> None:
        for event in (self.admitted(), tokens(1, 3, index=1), tokens(4, index=2), finished(index=3)):
            feed(event).wait()
        model.finalize()
        assert told == [{"stop": "a", "reason": "stop"}]

    def test_the_engine_is_told_once_of_a_client_that_went_away(self, feed: Any, model: Any, told: list[Any]) -> None:
        feed(self.admitted()).wait()
        for index in (1, 2):
            feed(tokens(1, index=index), cancelled=True).wait()
        model.finalize()
        assert told == [{"stop": "a", "reason": "cancelled"}]

    def test_an_engines_error_is_the_clients(self, feed: Any) -> None:
        feed(self.admitted()).wait()
        assert feed(Event("a", 1, "error", error="no room")).errors() == ["no room"]

    def test_lost_events_end_the_request_and_stop_the_engine(self, feed: Any, model: Any, told: list[Any]) -> None:
        feed(self.admitted()).wait()
        (message,) = feed(tokens(1, index=2)).errors()
        assert "lost before number 2" in message
        model.finalize()
        assert told == [{"stop": "a", "reason": "cancelled"}]

    def test_what_a_client_made_up_is_refused_and_changes_nothing(
        self, model: Any, make_request: Any, feed: Any, told: list[Any]
    ) -> None:
        feed(self.admitted()).wait()
        made_up = sealed_event(Event("a", 1, "error", error="x"))
        for change in ({"event": pack_event(Event("a", 1, "error", error="x"))}, {"output_ids": [1]}, {"event": ""}):
            request = make_request(**{**made_up, **change})
            model.execute([request])
            assert request.sender.errors()[0].startswith("event does not come from this server")
        assert feed(finished(index=1)).errors() == []
        model.finalize()
        assert told == []

    def test_a_defect_in_one_event_fails_that_alone(self, model: Any, make_request: Any, told: list[Any]) -> None:
        broken = make_request(**sealed_packet(EVENT_TENSORS, output_ids=[], output_log_probs=[], event="no json"))
        admitted = make_request(**sealed_event(self.admitted()))
        model.execute([broken, admitted])
        (message,) = broken.sender.errors()
        assert message.startswith("JSONDecodeError")
        assert admitted.sender.errors() == []
        model.finalize()
        assert told == []

    def test_a_response_that_cannot_be_sent_stops_the_engine_and_loses_no_other(
        self, model: Any, make_request: Any, feed: Any, told: list[Any]
    ) -> None:
        for key in ("lost", "kept"):
            feed(self.admitted(key)).wait()
        lost, kept = (make_request(**sealed_event(tokens(1, key=key, index=1))) for key in ("lost", "kept"))
        lost.sender.failures = [RuntimeError("the pipe is broken")]
        model.execute([lost, kept])
        assert kept.sender.errors() == []
        model.finalize()
        assert told == [{"stop": "lost", "reason": "cancelled"}]

    def test_a_large_response_that_cannot_be_sent_becomes_an_error(self, feed: Any, monkeypatch: Any) -> None:
        monkeypatch.setattr(sys.modules["irminsul_backend.triton_io.steps"], "LARGE_BYTES", 10)
        feed(self.admitted()).wait()
        sender = feed(tokens(1, index=1), failures=[RuntimeError("no shared memory")])
        assert sender.errors() == ["RuntimeError: no shared memory"]

    @pytest.mark.parametrize(("key", "words"), [("refused", "the engine is closed"), ("broken", "stop was not sent")])
    def test_a_stop_that_fails_is_logged_and_the_next_is_sent(
        self, key: str, words: str, model: Any, feed: Any, told: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in (key, "next"):
            feed(tokens(1, key=name, index=5)).errors()
        model.finalize()
        assert [command["stop"] for command in told] == [key, "next"]
        assert words in caplog.text
