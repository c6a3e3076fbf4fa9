"""The ensemble's three steps without Triton: what a client receives, and what the engine is told, when things fail."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from irminsul_backend.config import ServerConfig
from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.frontend.chunker import PromptPreparer
from irminsul_backend.frontend.replies import TranscriptTable
from irminsul_backend.protocol import Event, GenerationRequest, Usage
from irminsul_backend.triton_io.events import pack_event

START, END = 1, 2
USAGE = Usage(9, 1, 2, 6, 1, [(1, 2, -3)], 4, 0.5, 1.5)


class FakeEngine:
    """Takes requests; a test says what becomes of them."""

    def __init__(self) -> None:
        self.on_event: dict[str, Callable[[Event], None]] = {}
        self.stopped: list[tuple[str, str]] = []
        self.refusal: Exception | None = None
        self.status: Callable[[], dict[str, Any]] = lambda: {"integrity": "ok"}
        self.cache = self
        self.used = 0

    def stats(self) -> dict[str, Any]:
        return {"used": self.used, "capacity": 64}

    def submit(self, request: GenerationRequest, ids: Any, ends: Any, prints: Any, on_event: Any) -> None:
        if request.key == "refused":
            raise InvalidRequestError("request key 'refused' is in use")
        assert (ids.dtype, ends.dtype, prints.dtype) == (np.int32, np.int32, np.uint64)
        self.on_event[request.key] = on_event

    def stop(self, key: str, reason: str) -> bool:
        self.stopped.append((key, reason))
        return key in self.on_event

    def close(self) -> None:
        for key, on_event in self.on_event.items():
            on_event(Event(key, 99, "error", error="the server is shutting down"))


def plan(key: str = "a") -> dict[str, Any]:
    """The inputs of `irminsul_engine`."""
    request = GenerationRequest(key).pack()
    return {"token_ids": [5, 6], "chunk_ends": [2], "fingerprints": [2**64 - 1], "request": request}


def tokens(*ids: int, key: str = "a", index: int = 0) -> Event:
    return Event(key, index, "tokens", ids, [-0.5] * len(ids))


def finished(key: str = "a", index: int = 0) -> Event:
    return Event(key, index, "finished", finish_reason="length", usage=USAGE)


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
        outputs = backend_utils.outputs(response)
        packed = GenerationRequest.unpack(outputs["request"])
        assert (packed.session_id, packed.sampling.max_tokens) == (key, 3)
        assert outputs["chunk_ends"][-1] == len(outputs["token_ids"]) > 0
        assert len(outputs["fingerprints"]) == len(outputs["chunk_ends"])

    def test_a_request_needs_no_session(self, chunker: Any, make_request: Any, backend_utils: Any) -> None:
        requests = [make_request(0, 0, text_input="x") for _ in range(2)]
        chunker.execute(requests)
        plans = [backend_utils.outputs(request.sender.wait()[0]) for request in requests]
        one, other = (GenerationRequest.unpack(plan["request"]).session_id for plan in plans)
        assert one != other

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


class TestEngine:
    @pytest.fixture
    def engine(self) -> FakeEngine:
        return FakeEngine()

    @pytest.fixture
    def counted(self) -> list[Event]:
        return []

    @pytest.fixture
    def start(self, engine: FakeEngine, counted: list[Event], border: Any) -> Iterator[Callable[..., Any]]:
        models = []

        def make(interval_s: float = 0.0, on_finished: Any = counted.append) -> Any:
            models.append(border("steps").EngineModel(engine, on_finished, interval_s))
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

    def events(self, sender: Any, backend_utils: Any) -> list[dict[str, Any]]:
        outputs = [backend_utils.outputs(response) for response in sender.wait()]
        return [{**json.loads(o["event"]), "ids": o["output_ids"], "log_probs": o["output_log_probs"]} for o in outputs]

    def test_events_arrive_in_order_and_the_last_ends_the_request(
        self, ask: Any, engine: FakeEngine, counted: list[Event], backend_utils: Any
    ) -> None:
        sender = ask(**plan())
        for event in (Event("a", 0, "admitted"), tokens(1), Event("a", 2, "progress"), tokens(2, 3), finished()):
            engine.on_event["a"](event)
        events = self.events(sender, backend_utils)
        assert [event["index"] for event in events] == list(range(len(events)))
        assert [i for event in events for i in event["ids"]] == [1, 2, 3]
        assert [p for event in events for p in event["log_probs"]] == [-0.5] * 3
        assert events[-1]["kind"] == "finished"
        assert events[-1]["usage"]["prompt_tokens"] == 9
        assert [event.kind for event in counted] == ["finished"]

    def test_an_error_event_ends_the_request_too(self, ask: Any, engine: FakeEngine, backend_utils: Any) -> None:
        sender = ask(**plan())
        engine.on_event["a"](Event("a", 0, "error", error="no room"))
        (event,) = self.events(sender, backend_utils)
        assert (event["kind"], event["error"]) == ("error", "no room")

    def test_tokens_wait_for_the_interval_and_join(
        self, start: Any, engine: FakeEngine, make_request: Any, backend_utils: Any
    ) -> None:
        request = make_request(**plan())
        start(interval_s=60).execute([request])
        engine.on_event["a"](tokens(1))
        while not request.sender.responses:
            time.sleep(0.001)
        for i in (2, 3):
            engine.on_event["a"](tokens(i))
        engine.on_event["a"](finished())
        assert [event["ids"] for event in self.events(request.sender, backend_utils)] == [[1], [2, 3]]

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

    def test_missing_tensors_are_named(self, ask: Any) -> None:
        (message,) = ask(token_ids=[1], request="{}").errors()
        assert message.startswith("chunk_ends, fingerprints missing; requests belong to the model 'irminsul'")

    @pytest.mark.parametrize(
        ("command", "told"),
        [
            ({"stop": "a", "reason": "stop"}, ("a", "stop")),
            ({"stop": "a"}, ("a", "cancelled")),
            ({"stop": 5, "reason": "fun"}, ("5", "cancelled")),
        ],
    )
    def test_stop(self, command: Any, told: Any, ask: Any, engine: FakeEngine, backend_utils: Any) -> None:
        running = ask(**plan())
        (answer,) = self.events(ask(control=json.dumps(command)), backend_utils)
        assert answer["stopped"] is (told[0] == "a")
        assert engine.stopped == [told]
        assert not running.ended.is_set(), "its own events end it"

    @pytest.mark.parametrize("control", ["no json", "[]", "{}", '{"dance": true}', '{"status": false}', b"\xff"])
    def test_a_control_that_is_none_is_quoted(self, control: Any, ask: Any, engine: FakeEngine) -> None:
        (message,) = ask(control=control).errors()
        quoted = control if isinstance(control, str) else "\ufffd"
        assert message == f'control is {quoted}; it must be {{"stop": key}} or {{"status": true}}'
        assert engine.stopped == []

    def test_a_slow_status_holds_up_no_request(self, ask: Any, engine: FakeEngine, backend_utils: Any) -> None:
        step = threading.Event()

        def slow() -> dict[str, Any]:
            assert step.wait(10)
            return {"running": 1}

        engine.status = slow
        status = ask(control='{"status": true}')
        request = ask(**plan())
        engine.on_event["a"](finished())
        assert len(request.wait()) == 1
        assert not status.ended.is_set()
        step.set()
        assert self.events(status, backend_utils)[0]["running"] == 1

    def test_a_status_that_fails_is_an_error(self, ask: Any, engine: FakeEngine) -> None:
        def fail() -> dict[str, Any]:
            raise TimeoutError("the step takes too long")

        engine.status = fail
        assert ask(control='{"status": true}').errors() == ["TimeoutError: the step takes too long"]

    def test_a_client_that_takes_no_responses_holds_up_no_other(
        self, ask: Any, engine: FakeEngine, backend_utils: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        gone, here = ask(**plan("gone")), ask(**plan("here"))
        gone.failures = [RuntimeError("the pipe is broken")]
        engine.on_event["gone"](tokens(1, key="gone"))
        engine.on_event["here"](tokens(2, key="here"))
        engine.on_event["here"](finished("here"))
        assert [i for event in self.events(here, backend_utils) for i in event["ids"]] == [2]
        assert "the pipe is broken" in caplog.text

    def test_metrics_that_fail_lose_no_response(
        self, start: Any, engine: FakeEngine, make_request: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(event: Event) -> None:
            raise RuntimeError("no metrics")

        request = make_request(**plan())
        start(on_finished=fail).execute([request])
        engine.on_event["a"](finished())
        assert request.sender.errors() == []
        assert "no metrics" in caplog.text

    def test_the_end_of_the_server_reaches_every_client(
        self, start: Any, engine: FakeEngine, make_request: Any, backend_utils: Any
    ) -> None:
        requests = {key: make_request(**plan(key)) for key in ("a", "b")}
        model = start(interval_s=60)
        model.execute(list(requests.values()))
        engine.on_event["a"](tokens(1))
        engine.on_event["a"](tokens(2))
        model.finalize()
        for key, ids in (("a", [1, 2]), ("b", [])):
            events = self.events(requests[key].sender, backend_utils)
            assert [i for event in events for i in event["ids"]] == ids
            assert events[-1]["error"] == "the server is shutting down"

    def test_held_tokens_leave_when_the_server_ends(self, start: Any, engine: FakeEngine, make_request: Any) -> None:
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
        parts = [r.output_tensors()[0].as_numpy()[0] for r in request.sender.responses]
        assert np.concatenate(parts).tolist() == [1, 2, 3]


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
            commands.append(json.loads(tensor.as_numpy().item()))
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
        def one(event: Event, cancelled: bool = False) -> Any:
            data = {"output_ids": event.token_ids, "output_log_probs": event.log_probs, "event": pack_event(event)}
            request = make_request(**data)
            request.sender.cancelled = cancelled
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

    def test_a_defect_in_one_event_fails_that_alone(self, model: Any, make_request: Any, feed: Any) -> None:
        broken = make_request(output_ids=[], output_log_probs=[], event="no json")
        admitted = make_request(output_ids=[], output_log_probs=[], event=pack_event(self.admitted()))
        model.execute([broken, admitted])
        (message,) = broken.sender.errors()
        assert message.startswith("JSONDecodeError")
        assert admitted.sender.errors() == []

    @pytest.mark.parametrize(
        ("key", "words"), [("refused", "stop was refused: the engine is closed"), ("broken", "stop was not sent")]
    )
    def test_a_stop_that_fails_is_logged_and_the_next_is_sent(
        self, key: str, words: str, model: Any, feed: Any, told: list[Any], caplog: pytest.LogCaptureFixture
    ) -> None:
        for name in (key, "next"):
            feed(tokens(1, key=name, index=5)).errors()
        model.finalize()
        assert [command["stop"] for command in told] == [key, "next"]
        assert words in caplog.text


class TestMetrics:
    def test_ended_requests_and_the_pool(self, border: Any, backend_utils: ModuleType) -> None:
        engine = FakeEngine()
        metrics = border("metrics").EngineMetrics(engine)
        values = {name: metric.value for name, metric in backend_utils.metrics.items()}
        assert values.pop('irminsul_cache_slots{state="capacity"}') == 64
        assert set(values.values()) == {0.0}, "all are there from the start"
        engine.used = 7
        for event in (finished(), Event("b", 0, "error", error="x"), Event("c", 0, "finished")):
            metrics.count(event)
        values = {name: metric.value for name, metric in backend_utils.metrics.items() if metric.value}
        assert values == {
            'irminsul_prompt_tokens_total{source="exact"}': 1,
            'irminsul_prompt_tokens_total{source="shifted"}': 2,
            'irminsul_prompt_tokens_total{source="computed"}': 6,
            "irminsul_generated_tokens_total": 4,
            'irminsul_requests_total{outcome="length"}': 1,
            'irminsul_requests_total{outcome="error"}': 1,
            'irminsul_requests_total{outcome="stop"}': 1,
            'irminsul_cache_slots{state="used"}': 7,
            'irminsul_cache_slots{state="capacity"}': 64,
        }
