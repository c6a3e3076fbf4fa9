"""The engine's model without Triton: what clients receive, and what the engine is told, when things fail."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_engine import FakeEngine, FakeMetrics, finished, opened, plan, sealed_packet, sealed_plan, tokens

from irminsul_backend.protocol import Event, GenerationRequest
from irminsul_backend.triton_io.tensors import CONTROL_INPUT, EVENT_TENSORS


def order(command: dict[str, Any]) -> dict[str, Any]:
    """A control request, as the server's other models send it."""
    return sealed_packet((CONTROL_INPUT,), control=json.dumps(command))


class TestEngine:
    @pytest.fixture
    def engine(self) -> FakeEngine:
        return FakeEngine()

    @pytest.fixture
    def metrics(self) -> FakeMetrics:
        return FakeMetrics()

    @pytest.fixture
    def start(self, engine: FakeEngine, metrics: FakeMetrics, border: Any) -> Iterator[Callable[..., Any]]:
        models = []

        def make(interval_s: float = 0.0) -> Any:
            models.append(border("engine_model").EngineModel(engine, metrics, interval_s))
            return models[-1]

        yield make
        engine.on_event.clear()
        for model in models:
            model.finalize()

    @pytest.fixture
    def ask(self, start: Any, make_request: Any) -> Callable[..., Any]:
        model = start()

        def one(**inputs: Any) -> Any:
            request = make_request(**inputs)
            model.execute([request])
            return request.sender

        return one

    def events(self, sender: Any) -> list[dict[str, Any]]:
        outputs = [opened(EVENT_TENSORS, response) for response in sender.wait()]
        return [
            {**json.loads(o["event"]), "ids": [*o["output_ids"]], "log_probs": [*o["output_log_probs"]]}
            for o in outputs
        ]

    def test_events_arrive_in_order_and_the_last_ends_the_request(
        self, ask: Any, engine: FakeEngine, metrics: FakeMetrics
    ) -> None:
        sender = ask(**plan())
        for event in (Event("a", 0, "admitted"), tokens(1), Event("a", 2, "progress"), tokens(2, 3), finished()):
            engine.on_event["a"](event)
        events = self.events(sender)
        assert [event["index"] for event in events] == list(range(len(events)))
        assert [i for event in events for i in event["ids"]] == [1, 2, 3]
        assert [p for event in events for p in event["log_probs"]] == [-0.5] * 3
        assert events[-1]["kind"] == "finished"
        assert events[-1]["usage"]["prompt_tokens"] == 9
        assert metrics.counted[-1].kind == "finished"
        assert [i for event in metrics.counted for i in event.token_ids] == [1, 2, 3]

    def test_an_error_event_ends_the_request_too(self, ask: Any, engine: FakeEngine) -> None:
        sender = ask(**plan())
        engine.on_event["a"](Event("a", 0, "error", error="no room"))
        (event,) = self.events(sender)
        assert (event["kind"], event["error"]) == ("error", "no room")

    def test_tokens_wait_for_the_interval_and_join(self, start: Any, engine: FakeEngine, make_request: Any) -> None:
        request = make_request(**plan())
        start(interval_s=60).execute([request])
        engine.on_event["a"](tokens(1))
        while not request.sender.responses:
            time.sleep(0.001)
        for i in (2, 3):
            engine.on_event["a"](tokens(i))
        engine.on_event["a"](finished())
        assert [event["ids"] for event in self.events(request.sender)] == [[1], [2, 3]]

    def test_held_tokens_leave_when_they_are_due(self, start: Any, engine: FakeEngine, make_request: Any) -> None:
        request = make_request(**plan())
        start(interval_s=0.2).execute([request])
        engine.on_event["a"](tokens(1))
        while not request.sender.responses:
            time.sleep(0.001)
        begin = time.monotonic()
        engine.on_event["a"](tokens(2))
        while len(request.sender.responses) < 2:
            time.sleep(0.001)
        assert 0.1 < time.monotonic() - begin < 5

    def test_a_request_that_the_engine_refuses_fails_alone(
        self, start: Any, engine: FakeEngine, make_request: Any
    ) -> None:
        refused, accepted = make_request(**plan("refused")), make_request(**plan("b"))
        start().execute([refused, accepted])
        assert refused.sender.errors() == ["request key 'refused' is in use"]
        engine.on_event["b"](finished("b"))
        assert accepted.sender.errors() == []

    @pytest.mark.parametrize(
        "change",
        [
            {"request": GenerationRequest("a").pack()},
            {"request": b"0" * 16 + GenerationRequest("a").pack()},
            {"request": ""},
            {"token_ids": [5, 7]},
            {"token_ids": [5, 6, 2], "chunk_ends": []},
            {"fingerprints": [1]},
        ],
    )
    def test_a_plan_that_the_chunker_did_not_seal_is_refused(self, change: Any, ask: Any, engine: FakeEngine) -> None:
        (message,) = ask(**{**plan(), **change}).errors()
        assert message.startswith("request does not come from this server; only its own models may call this one")
        assert engine.on_event == {}

    def test_a_plan_lacks_no_tensor(self, ask: Any, engine: FakeEngine) -> None:
        inputs = plan()
        del inputs["chunk_ends"]
        assert ask(**inputs).errors()[0].startswith("request does not come from this server")

    @pytest.mark.parametrize(
        ("command", "told"),
        [
            ({"stop": "a", "reason": "stop"}, ("a", "stop")),
            ({"stop": "a"}, ("a", "cancelled")),
            ({"stop": "b", "reason": "fun"}, ("b", "cancelled")),
        ],
    )
    def test_stop(self, command: Any, told: Any, ask: Any, engine: FakeEngine) -> None:
        running = ask(**plan())
        assert ask(**order(command)).wait() == [], "tensors in its answer would be freed without the interpreter lock"
        assert engine.stopped == [told]
        assert not running.ended.is_set(), "its own events end it"

    @pytest.mark.parametrize("control", ['{"stop": "a"}', '{"status": true}', "", b"\xff" * 40])
    def test_an_order_that_no_model_sealed_is_refused(self, control: Any, ask: Any, engine: FakeEngine) -> None:
        (message,) = ask(control=control).errors()
        assert message.startswith("control does not come from this server")
        assert engine.stopped == []

    def test_a_seal_is_good_for_its_own_kind_of_packet_only(self, ask: Any, engine: FakeEngine) -> None:
        packet = sealed_plan(b'{"stop": "a"}')["request"]
        assert ask(control=packet).errors()[0].startswith("control does not come from this server")

    def test_a_slow_status_holds_up_no_request(self, ask: Any, engine: FakeEngine) -> None:
        step = threading.Event()

        def slow() -> dict[str, Any]:
            assert step.wait(10)
            return {"running": 1}

        engine.status = slow
        status = ask(**order({"status": True}))
        request = ask(**plan())
        engine.on_event["a"](finished())
        assert len(request.wait()) == 1
        assert not status.ended.is_set()
        step.set()
        (response,) = status.wait()
        assert json.loads(response.output_tensors()[2].as_numpy().item()) == {"running": 1}

    def test_a_status_that_fails_is_an_error(self, ask: Any, engine: FakeEngine) -> None:
        def fail() -> dict[str, Any]:
            raise TimeoutError("the step takes too long")

        engine.status = fail
        assert ask(**order({"status": True})).errors() == ["TimeoutError: the step takes too long"]

    def test_an_event_that_cannot_be_sent_ends_its_request_and_no_other(
        self, ask: Any, engine: FakeEngine, caplog: pytest.LogCaptureFixture
    ) -> None:
        gone, here = ask(**plan("gone")), ask(**plan("here"))
        gone.failures = [RuntimeError("the pipe is broken")]
        engine.on_event["gone"](tokens(1, key="gone"))
        engine.on_event["here"](tokens(2, key="here"))
        engine.on_event["here"](finished("here"))
        assert [i for event in self.events(here) for i in event["ids"]] == [2]
        assert gone.errors() == ["RuntimeError: the pipe is broken"]
        assert engine.stopped == [("gone", "cancelled")]
        assert "the pipe is broken" in caplog.text
        engine.on_event["gone"](finished("gone"))  # the engine's own end of it, which nobody awaits
        ask(**plan("next"))
        engine.on_event["next"](finished("next"))
        gone.wait()

    def test_a_refusal_that_cannot_be_sent_loses_no_other_request(
        self, start: Any, engine: FakeEngine, make_request: Any
    ) -> None:
        refused, accepted = make_request(**plan("refused")), make_request(**plan("b"))
        refused.sender.failures = [RuntimeError("the pipe is broken")]
        start().execute([refused, accepted])
        engine.on_event["b"](finished("b"))
        assert accepted.sender.errors() == []

    def test_an_engine_that_fails_says_so_to_its_clients_and_ends_process_and_server(
        self, start: Any, engine: FakeEngine, make_request: Any, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
    ) -> None:
        ended = threading.Event()
        calls: list[Any] = []
        monkeypatch.setattr(os, "kill", lambda *call: calls.append(call))
        monkeypatch.setattr(os, "_exit", lambda code: (calls.append(code), ended.set()))
        request = make_request(**plan())
        model = start()
        model.execute([request])
        assert model.is_ready()
        engine.on_event["a"](Event("a", 0, "error", error="the GPU is gone"))
        model.on_fatal("CUDA error: an illegal memory access was encountered")
        assert not model.is_ready()
        assert ended.wait(10)
        assert calls == [(os.getppid(), signal.SIGTERM), 1]
        (event,) = self.events(request.sender)
        assert event["error"] == "the GPU is gone"
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == (
            "error: the engine has failed and the server ends: CUDA error: an illegal memory access was encountered"
        )

    def test_metrics_that_fail_lose_no_response(
        self, ask: Any, engine: FakeEngine, metrics: FakeMetrics, caplog: pytest.LogCaptureFixture
    ) -> None:
        metrics.failure = RuntimeError("no metrics")
        sender = ask(**plan())
        engine.on_event["a"](finished())
        assert sender.errors() == []
        assert "no metrics" in caplog.text

    def test_the_end_of_the_server_reaches_every_client(
        self, start: Any, engine: FakeEngine, make_request: Any
    ) -> None:
        requests = {key: make_request(**plan(key)) for key in ("a", "b")}
        model = start(interval_s=60)
        model.execute(list(requests.values()))
        engine.on_event["a"](tokens(1))
        engine.on_event["a"](tokens(2))
        model.finalize()
        for key, ids in (("a", [1, 2]), ("b", [])):
            events = self.events(requests[key].sender)
            assert [i for event in events for i in event["ids"]] == ids
            assert events[-1]["error"] == "the server is shutting down"

    def test_held_tokens_leave_when_the_server_ends(
        self, start: Any, engine: FakeEngine, metrics: FakeMetrics, make_request: Any
    ) -> None:
        request = make_request(**plan())
        model = start(interval_s=60)
        model.execute([request])
        for i in (1, 2):
            engine.on_event["a"](tokens(i))
        while not request.sender.responses:
            time.sleep(0.001)
        engine.on_event["a"](tokens(3))
        engine.on_event.clear()
        model.finalize()
        assert metrics.closed
        parts = [r.output_tensors()[0].as_numpy()[0] for r in request.sender.responses]
        assert np.concatenate(parts).tolist() == [1, 2, 3]
