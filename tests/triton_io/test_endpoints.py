"""The unary endpoint without Triton: what a client receives from an ensemble that refuses, breaks off or goes on."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from irminsul_backend.triton_io.sealing import unseal
from irminsul_backend.triton_io.tensors import CONTROL_INPUT

PREFIX = "in ensemble 'irminsul_generate', "


class Ensemble:
    """Answers the endpoint's requests as the ensemble does, and the engine's control requests."""

    def __init__(self, backend_utils: Any) -> None:
        self.utils = backend_utils
        self.inputs: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.answer: Callable[[], Iterator[Any]] = lambda: iter([self.reply("hello"), self.nothing()])

    def __call__(self, request: Any) -> Iterator[Any]:
        if request.model_name == "irminsul_engine":
            packet = unseal((CONTROL_INPUT,), {"control": request.inputs()[0].as_numpy().item()})
            self.stopped.append(json.loads(packet["control"])["stop"])
            return iter([self.nothing()])
        assert request.model_name == "irminsul_generate"
        self.inputs.append({t.name(): t.as_numpy().item() for t in request.inputs() if t.as_numpy().size == 1})
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
def endpoint(endpoints: Any) -> Iterator[Any]:
    one = endpoints.UnaryEndpoint()
    yield one
    one.finalize()


@pytest.fixture
def ask(endpoint: Any, make_request: Any) -> Callable[..., Any]:
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
    def test_no_stream_is_asked_for(self, ask: Any, ensemble: Ensemble, backend_utils: Any) -> None:
        assert texts(ask(text_input="x", stream=True), backend_utils) == ["hello"]
        assert ensemble.inputs[0]["text_input"] == b"x"
        assert ensemble.inputs[0]["stream"] is False

    def test_the_session_and_the_clients_key_are_the_ensembles(self, ask: Any, ensemble: Ensemble) -> None:
        ask(text_input="x", session_id="s", session_end=True, cancel_key="k").wait()
        ask(text_input="x", cancel_key="").wait()
        named, unnamed = ensemble.inputs
        assert named == {
            "text_input": b"x", "session_id": b"s", "session_end": True, "cancel_key": b"k", "stream": False
        }  # fmt: skip
        assert len(unnamed["cancel_key"]) == 32, "an empty key would stop nothing"

    def test_a_batch_is_refused(self, endpoint: Any, ensemble: Ensemble, backend_utils: Any) -> None:
        request = backend_utils.InferenceRequest(
            inputs=[backend_utils.Tensor("text_input", np.array([[b"a"], [b"b"]], object))]
        )
        endpoint.execute([request])
        (message,) = request.sender.errors()
        assert message == "text_input has shape [2, 1]; send one request at a time, shape [1, n]"
        assert ensemble.inputs == []

    def test_a_key_that_is_no_text_is_refused(self, ask: Any, ensemble: Ensemble) -> None:
        (message,) = ask(text_input="x", cancel_key=b"k\xff").errors()
        assert message == "cancel_key is not UTF-8: byte 1 is 0xff"
        assert ensemble.inputs == []

    def test_the_ensemble_judges_a_request_without_inputs(self, ask: Any, ensemble: Ensemble) -> None:
        ensemble.answer = lambda: iter([ensemble.error("the prompt must be given")])
        assert ask().errors() == ["the prompt must be given"]

    def test_outputs_that_nobody_asked_for_are_held_while_they_are_dropped(
        self, ask: Any, ensemble: Ensemble, backend_utils: Any
    ) -> None:
        (response,) = ask(text_input="x", outputs=["usage"]).wait()
        assert response.output_tensors() == []


class TestFaults:
    def test_an_error_has_the_steps_own_words(self, ask: Any, ensemble: Ensemble) -> None:
        ensemble.answer = lambda: iter([ensemble.error("max_tokens is 0"), ensemble.nothing()])
        assert ask(text_input="x").errors() == ["max_tokens is 0"]

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

    def test_an_ensemble_that_breaks_off_stops_the_engine(self, ask: Any, ensemble: Ensemble) -> None:
        def answer() -> Iterator[Any]:
            raise RuntimeError("the pipe is broken")
            yield

        ensemble.answer = answer
        assert ask(text_input="x", cancel_key="k").errors() == ["RuntimeError: the pipe is broken"]
        until(lambda: ensemble.stopped == ["k"])

    def test_an_answer_that_cannot_be_sent_loses_no_other(
        self, endpoint: Any, make_request: Any, backend_utils: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        lost, kept = make_request(text_input="x"), make_request(text_input="x")
        lost.sender.failures = [RuntimeError("the pipe is broken")]
        endpoint.execute([lost, kept])
        assert texts(kept.sender, backend_utils) == ["hello"]
        until(lambda: "the pipe is broken" in caplog.text)

    def test_at_the_end_every_request_gets_an_answer(
        self, endpoints: Any, ensemble: Ensemble, make_request: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(endpoints, "MAX_THREADS", 1)
        begun, go = threading.Event(), threading.Event()

        def answer() -> Iterator[Any]:
            begun.set()
            assert go.wait(10)
            yield ensemble.reply("late")

        ensemble.answer = answer
        endpoint = endpoints.UnaryEndpoint()
        running, queued = make_request(text_input="x"), make_request(text_input="x")
        endpoint.execute([running, queued])
        assert begun.wait(10)
        endpoint.finalize()
        assert queued.sender.errors() == running.sender.errors() == ["the server is shutting down"]
        go.set()
        time.sleep(0.05)
        running.sender.wait()  # checks that nothing came after the end


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

    def test_the_engine_is_told_until_the_request_has_ended(
        self, ask: Any, ensemble: Ensemble, generating: threading.Event
    ) -> None:
        """While the request is still in the chunker the engine does not know it, and a stop does nothing."""
        stays, goes = ask(text_input="x", cancel_key="stays"), ask(text_input="x", cancel_key="goes")
        goes.cancelled = True
        until(lambda: len(ensemble.stopped) > 2)
        generating.set()
        assert (stays.errors(), goes.errors()) == ([], [])
        time.sleep(0.02)
        count = len(ensemble.stopped)
        time.sleep(0.05)
        assert ensemble.stopped == ["goes"] * count

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
        until(lambda: ensemble.stopped)
        assert set(ensemble.stopped) == {"goes"}
        until(lambda: "could not ask whether a client is still there" in caplog.text)

    def test_a_client_that_cannot_be_asked_about_gets_its_answer(
        self, endpoints: Any, backend_utils: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        sender = backend_utils.InferenceResponseSender()
        sender.cancel_failures = [RuntimeError("no such request")]
        endpoints.Client(sender, endpoints.RetiredResponses()).finish(backend_utils.InferenceResponse([]))
        assert len(sender.wait()) == 1
        assert "no such request" in caplog.text

    def test_a_key_in_use_stays_with_the_request_that_runs(self, ask: Any, ensemble: Ensemble, generating: Any) -> None:
        first = ask(text_input="x", cancel_key="k")
        until(lambda: len(ensemble.inputs) == 1)
        ensemble.answer = lambda: iter([ensemble.error("request key 'k' is in use by a running request")])
        assert ask(text_input="x", cancel_key="k").errors() == ["request key 'k' is in use by a running request"]
        assert ensemble.stopped == []
        first.cancelled = True
        until(lambda: "k" in ensemble.stopped)


class TestRetiredResponses:
    """They may be freed only once the stub's own thread has let go of them: not before it has answered a question."""

    class Response:
        pass

    def test_kept_until_a_client_is_known_to_be_there(self, endpoints: Any, backend_utils: Any) -> None:
        retired, sender = endpoints.RetiredResponses(), backend_utils.InferenceResponseSender()
        one = self.Response()
        held = weakref.ref(one)
        retired.keep([one])
        del one
        sender.cancelled = True
        assert retired.ask(sender)
        assert held() is not None, "that it is cancelled may be remembered from an earlier question"
        sender.cancelled = False
        assert not retired.ask(sender)
        assert held() is None

    def test_what_comes_while_the_question_is_asked_stays(self, endpoints: Any, backend_utils: Any) -> None:
        retired, one = endpoints.RetiredResponses(), self.Response()
        held = weakref.ref(one)

        class Sender:
            def is_cancelled(self) -> bool:
                retired.keep([held()])
                return False

        assert not retired.ask(Sender())
        del one
        assert held() is not None
        assert not retired.ask(backend_utils.InferenceResponseSender())
        assert held() is None
