"""The HTTP endpoints without Triton: what a client receives from an ensemble that refuses, breaks off or goes on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from irminsul_backend.errors import SessionError
from irminsul_backend.frontend.sessions import SessionTable

START, END = 1, 2
PREFIX = "in ensemble 'irminsul', "


class Ensemble:
    """Answers the endpoints' requests as the ensemble does, and the engine's control requests."""

    def __init__(self, backend_utils: Any) -> None:
        self.utils = backend_utils
        self.sessions = SessionTable(60)
        self.asked: list[Any] = []
        self.inputs: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.answer: Callable[[], Iterator[Any]] = lambda: iter([self.reply("hello"), self.nothing()])

    def __call__(self, request: Any) -> Iterator[Any]:
        if request.model_name == "irminsul_engine":
            self.stopped.append(json.loads(request.inputs()[0].as_numpy().item())["stop"])
            return iter([])
        assert request.model_name == "irminsul"
        self.asked.append(request)
        self.inputs.append({t.name(): t.as_numpy().item() for t in request.inputs() if t.as_numpy().size == 1})
        try:
            self.sessions.enter(request.correlation_id(), bool(request.flags() & START), bool(request.flags() & END))
        except SessionError as error:
            return iter([self.error(str(error))])
        return self.answer()

    def reply(self, text: str) -> Any:
        return self.utils.InferenceResponse([self.utils.Tensor("text_output", np.array([[text.encode()]], object))])

    def nothing(self) -> Any:
        """The empty response that ends a stream."""
        return self.utils.InferenceResponse([])

    def error(self, message: str) -> Any:
        return self.utils.InferenceResponse(error=self.utils.TritonError(PREFIX + message))


@pytest.fixture
def ensemble(backend_utils: Any, monkeypatch: pytest.MonkeyPatch) -> Ensemble:
    one = Ensemble(backend_utils)
    monkeypatch.setattr(backend_utils, "bls", one)
    return one


@pytest.fixture
def endpoints(ensemble: Ensemble, border: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = border("endpoints")
    monkeypatch.setattr(module, "WATCH_SECONDS", 0.005)
    return module


@pytest.fixture
def start(endpoints: Any) -> Iterator[Callable[[bool], Any]]:
    started = []

    def make(streams: bool) -> Any:
        started.append(endpoints.Endpoint(streams))
        return started[-1]

    yield make
    for endpoint in started:
        endpoint.finalize()


@pytest.fixture
def ask(start: Any, make_request: Any) -> Callable[..., Any]:
    endpoint = start(True)

    def one(**inputs: Any) -> Any:
        request = make_request(**inputs)
        endpoint.execute([request])
        return request.sender

    return one


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def texts(sender: Any, backend_utils: Any) -> list[str]:
    return [backend_utils.outputs(response)["text_output"] for response in sender.wait()]


class TestRequests:
    def test_every_reply_of_a_stream(self, ask: Any, ensemble: Ensemble, backend_utils: Any) -> None:
        ensemble.answer = lambda: iter([*map(ensemble.reply, "abc"), ensemble.nothing()])
        assert texts(ask(text_input="x", stream=True), backend_utils) == ["a", "b", "c"]
        assert ensemble.inputs[0]["text_input"] == b"x"
        assert ensemble.inputs[0]["stream"] is True

    def test_a_unary_endpoint_asks_for_no_stream(
        self, start: Any, ensemble: Ensemble, make_request: Any, backend_utils: Any
    ) -> None:
        request = make_request(text_input="x", stream=True)
        start(False).execute([request])
        assert texts(request.sender, backend_utils) == ["hello"]
        assert ensemble.inputs[0]["stream"] is False

    def test_session_and_key_become_the_requests_own(self, ask: Any, ensemble: Ensemble) -> None:
        ask(text_input="x", session_id="s", session_end=True, cancel_key="k").wait()
        ask(text_input="x", cancel_key="").wait()
        named, unnamed = ensemble.inputs
        assert named == {"text_input": b"x", "cancel_key": b"k"}
        assert ensemble.asked[0].correlation_id() == "s"
        assert len(unnamed["cancel_key"]) == 32, "an empty key would stop nothing"
        assert ensemble.asked[1].flags() == START | END

    def test_a_batch_is_refused(self, ask: Any, ensemble: Ensemble, start: Any, backend_utils: Any) -> None:
        request = backend_utils.InferenceRequest(
            inputs=[backend_utils.Tensor("text_input", np.array([[b"a"], [b"b"]], object))]
        )
        start(True).execute([request])
        (message,) = request.sender.errors()
        assert message == "text_input has shape [2, 1]; send one request at a time, shape [1, n]"
        assert ensemble.asked == []

    def test_the_ensemble_judges_a_request_without_inputs(self, ask: Any, ensemble: Ensemble) -> None:
        ensemble.answer = lambda: iter([ensemble.error("the prompt must be given")])
        assert ask().errors() == ["the prompt must be given"]


class TestSessions:
    def test_opened_by_the_first_request_and_ended_when_told(
        self, ask: Any, ensemble: Ensemble, backend_utils: Any
    ) -> None:
        for end in (False, False, True, True):
            assert texts(ask(text_input="x", session_id="s", session_end=end), backend_utils) == ["hello"]
        assert [request.flags() for request in ensemble.asked] == [START, 0, END, START | END]

    def test_opened_elsewhere(self, ask: Any, ensemble: Ensemble, backend_utils: Any) -> None:
        ensemble.sessions.enter("s", True, False)
        assert texts(ask(text_input="x", session_id="s"), backend_utils) == ["hello"]
        assert [request.flags() for request in ensemble.asked] == [START, 0]

    def test_ended_elsewhere(self, ask: Any, ensemble: Ensemble, backend_utils: Any) -> None:
        ask(text_input="x", session_id="s").wait()
        ensemble.sessions.enter("s", False, True)
        assert texts(ask(text_input="x", session_id="s", session_end=True), backend_utils) == ["hello"]
        assert [request.flags() for request in ensemble.asked[1:]] == [END, START | END]

    def test_dropped_by_triton_itself(self, ask: Any, ensemble: Ensemble, backend_utils: Any) -> None:
        def triton(session: str, start: bool, end: bool) -> None:
            if not start:
                raise SessionError(f"sequence {session} to model 'irminsul_chunker' must specify the START flag")

        ensemble.sessions.enter = triton  # type: ignore[method-assign]
        for _ in range(2):
            assert texts(ask(text_input="x", session_id="s"), backend_utils) == ["hello"]
        assert [request.flags() for request in ensemble.asked] == [START, 0, START]

    def test_a_session_that_others_keep_changing_ends_in_one_error(self, ask: Any, ensemble: Ensemble) -> None:
        def change() -> Iterator[Any]:
            if ensemble.asked[-1].flags() & START:
                return iter([ensemble.error("session 's' is already open")])
            return iter([ensemble.error("session 's' is unknown or expired")])

        ensemble.answer = change
        ensemble.sessions.enter = lambda *_: None  # type: ignore[method-assign]
        (message,) = ask(text_input="x", session_id="s").errors()
        assert message.startswith("session 's' is")
        assert len(ensemble.asked) == 4

    def test_a_request_without_a_session_is_not_tried_again(self, ask: Any, ensemble: Ensemble) -> None:
        ensemble.answer = lambda: iter([ensemble.error("session 's' is already open")])
        assert ask(text_input="x").errors() == ["session 's' is already open"]
        assert len(ensemble.asked) == 1

    @pytest.mark.parametrize(
        ("session", "words"),
        [
            (b"a\xff", "session_id is not UTF-8: byte 1 is 0xff"),
            ("a\0b", "holds a NUL character"),
            ("", "session_id is empty; leave it out"),
        ],
    )
    def test_a_bad_id_is_refused(self, session: Any, words: str, ask: Any, ensemble: Ensemble) -> None:
        (message,) = ask(text_input="x", session_id=session).errors()
        assert words in message
        assert ensemble.asked == []

    def test_only_so_many_are_remembered(self, endpoints: Any) -> None:
        known = endpoints.KnownSessions(limit=2)
        for session in "abac":
            known.note(session, is_open=True)
        assert [session in known for session in "abc"] == [True, False, True], "the one unused for longest goes"
        known.note("a", is_open=False)
        assert "a" not in known


class TestFaults:
    def test_an_error_has_the_steps_own_words(self, ask: Any, ensemble: Ensemble) -> None:
        ensemble.answer = lambda: iter([ensemble.error("max_tokens is 0"), ensemble.nothing()])
        assert ask(text_input="x").errors() == ["max_tokens is 0"]

    @pytest.mark.parametrize("message", ["the server is shutting down", "the file is already open"])
    def test_an_error_in_the_middle_of_a_stream(
        self, message: str, ask: Any, ensemble: Ensemble, backend_utils: Any
    ) -> None:
        ensemble.answer = lambda: iter([ensemble.reply("a"), ensemble.reply("b"), ensemble.error(message)])
        *replies, last = ask(text_input="x", session_id="s").wait()
        assert [backend_utils.outputs(reply)["text_output"] for reply in replies] == ["a", "b"]
        assert last.error().message() == message
        assert len(ensemble.asked) == 1, "what has begun is never tried again"

    def test_an_ensemble_that_says_nothing(self, ask: Any, ensemble: Ensemble) -> None:
        ensemble.answer = lambda: iter([ensemble.nothing()])
        (message,) = ask(text_input="x").errors()
        assert "the ensemble ended without an answer" in message

    def test_an_ensemble_that_is_gone(
        self, ask: Any, backend_utils: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def gone(request: Any) -> Any:
            raise RuntimeError("model irminsul is not ready")

        monkeypatch.setattr(backend_utils, "bls", gone)
        assert ask(text_input="x").errors() == ["RuntimeError: model irminsul is not ready"]
        assert "request failed" in caplog.text

    def test_a_response_that_cannot_be_sent_stops_the_engine(self, ask: Any, ensemble: Ensemble) -> None:
        go = threading.Event()

        def answer() -> Iterator[Any]:
            yield ensemble.reply("a")
            go.wait(10)
            yield ensemble.reply("b")

        ensemble.answer = answer
        sender = ask(text_input="x", cancel_key="k")
        sender.failures = [RuntimeError("the pipe is broken")]
        go.set()
        assert sender.errors() == ["RuntimeError: the pipe is broken"]
        until(lambda: ensemble.stopped == ["k"])


class TestClientsThatGoAway:
    @pytest.fixture
    def generating(self, ensemble: Ensemble) -> Iterator[threading.Event]:
        """Answers go on until the test sets this."""
        end = threading.Event()

        def answer() -> Iterator[Any]:
            assert end.wait(10)
            yield ensemble.reply("done")

        ensemble.answer = answer
        yield end
        end.set()

    def test_the_engine_is_told_once(self, ask: Any, ensemble: Ensemble, generating: threading.Event) -> None:
        stays, goes = ask(text_input="x", cancel_key="stays"), ask(text_input="x", cancel_key="goes")
        goes.cancelled = True
        until(lambda: ensemble.stopped)
        time.sleep(0.05)
        generating.set()
        assert (stays.errors(), goes.errors()) == ([], [])
        assert ensemble.stopped == ["goes"]

    def test_nobody_is_asked_about_after_the_end(self, ask: Any, ensemble: Ensemble, generating: Any) -> None:
        sender = ask(text_input="x", cancel_key="k")
        generating.set()
        sender.wait()
        sender.cancelled = True
        time.sleep(0.05)
        sender.wait()  # checks that the sender was used by the rules
        assert ensemble.stopped == []

    def test_a_client_that_cannot_be_asked_about_hides_no_other(
        self, ask: Any, ensemble: Ensemble, generating: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        broken = ask(text_input="x", cancel_key="broken")
        broken.cancel_failures = [RuntimeError("no such request")]
        ask(text_input="x", cancel_key="goes").cancelled = True
        until(lambda: ensemble.stopped == ["goes"])
        assert "could not ask whether a client is still there" in caplog.text

    def test_a_key_in_use_stays_with_the_request_that_runs(self, ask: Any, ensemble: Ensemble, generating: Any) -> None:
        first = ask(text_input="x", cancel_key="k")
        until(lambda: len(ensemble.asked) == 1)
        ensemble.answer = lambda: iter([ensemble.error("request key 'k' is in use by a running request")])
        assert ask(text_input="x", cancel_key="k").errors() == ["request key 'k' is in use by a running request"]
        assert ensemble.stopped == []
        first.cancelled = True
        until(lambda: ensemble.stopped == ["k"])
