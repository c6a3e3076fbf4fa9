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


