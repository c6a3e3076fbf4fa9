"""Submit, stop, drain and close from many threads: every accepted request gets exactly one last event."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from irminsul_backend.chunking import PRESETS
from irminsul_backend.engine import Engine
from irminsul_backend.errors import OverloadedError, UnavailableError
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import SamplingParams

Text = Callable[[int], np.ndarray]
LAST = ("finished", "error")


class Client:
    """Submits requests and collects their events."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.events: dict[str, list] = {}

    def submit(self, key: str, max_tokens: int = 3, namespace: str = "n", **fields) -> None:
        mine: list = []
        request = GenerationRequest(key, namespace=namespace, sampling=SamplingParams(max_tokens=max_tokens), **fields)
        arrays = np.arange(2, 22, dtype=np.int32), np.array([20], np.int32), np.zeros(1, np.uint64)
        self.engine.submit(request, *arrays, mine.append)
        self.events[key] = mine

    def wait_for(self, key: str, kind: str) -> None:
        deadline = time.monotonic() + 60
        while not any(e.kind == kind for e in self.events[key]):
            assert time.monotonic() < deadline, f"{key} had no {kind} event"
            time.sleep(0.001)


@pytest.fixture
def client(models) -> Client:
    engine = Engine(models["one"], 4096, PRESETS["default"], max_waiting=100, max_waiting_per_namespace=60)
    return Client(engine)


def test_closing_while_others_submit_and_stop_loses_nobody(models) -> None:
    for _ in range(5):
        client = Client(Engine(models["one"], 4096, PRESETS["default"], max_running=4))
        client.engine.start()

        def send(name: int, client: Client = client) -> int:
            for i in range(10_000):
                key = f"{name}-{i}"
                try:
                    client.submit(key)
                except UnavailableError as error:
                    assert "shutting down" in str(error)
                    return i
                client.engine.stop(key)
            return i

        with ThreadPoolExecutor(4) as pool:
            sent = [pool.submit(send, name) for name in range(4)]
            time.sleep(0.05)
            client.engine.close()
            assert sum(one.result(timeout=30) for one in sent) == len(client.events)
        for events in client.events.values():
            assert [e.kind in LAST for e in events] == [False] * (len(events) - 1) + [True]


def test_closing_before_the_start_ends_what_waits(client: Client) -> None:
    client.submit("a")
    client.engine.close()
    assert client.events["a"][-1].error == "the server is shutting down"
    with pytest.raises(UnavailableError):
        client.submit("b")
    client.engine.close()


def test_a_stop_right_after_its_submit_takes_effect(client: Client) -> None:
    client.submit("a", max_tokens=1000)
    assert client.engine.stop("a") and client.engine.stop("a")
    client.engine.start()
    client.wait_for("a", "finished")
    assert client.events["a"][-1].finish_reason == "cancelled"
    assert not client.engine.stop("a")
    client.engine.close()


class TestDraining:
    def test_those_that_run_finish_and_no_others_come(self, client: Client) -> None:
        client.engine.start()
        client.submit("a", max_tokens=200)
        client.wait_for("a", "admitted")
        refused = threading.Event()

        def refuse() -> None:
            while client.engine.snapshot().state == "running":
                time.sleep(0.001)
            with pytest.raises(UnavailableError, match="shutting down"):
                client.submit("late")
            refused.set()

        thread = threading.Thread(target=refuse)
        thread.start()
        assert client.engine.drain(60)
        thread.join(10)
        assert refused.is_set()
        assert client.events["a"][-1].finish_reason == "length"
        assert client.engine.snapshot().state == "closed"

    def test_after_the_grace_time_the_rest_gets_an_error(self, client: Client) -> None:
        client.engine.start()
        client.submit("a", max_tokens=4000)
        assert not client.engine.drain(0.05)
        assert client.events["a"][-1].error == "the server is shutting down"


class TestTheQueue:
    def test_a_full_queue_refuses_with_length_limit_and_time(self, client: Client) -> None:
        for i in range(60):
            client.submit(str(i))
        with pytest.raises(OverloadedError, match=r"60 requests .* max_waiting_per_namespace .*retry after \d+ s") as e:
            client.submit("one more")
        assert e.value.retry_after_s >= 1
        for i in range(60, 100):
            client.submit(str(i), namespace="m")
        with pytest.raises(OverloadedError, match="100 requests of the server are waiting, as many as max_waiting"):
            client.submit("one more", namespace="o")
        client.engine.start()
        for i in range(100):
            client.wait_for(str(i), "finished")
        client.submit("one more")
        client.wait_for("one more", "finished")
        counters = client.engine.status()["counters"]
        assert (counters["rejected_namespace_full"], counters["rejected_queue_full"]) == (1, 1)
        client.engine.close()

    def test_a_deadline_counts_from_the_arrival(self, client: Client) -> None:
        client.submit("late", max_tokens=5, timeout_ms=20)
        client.submit("in time", max_tokens=5, timeout_ms=2**31 - 1)
        client.submit("stopped", max_tokens=5, timeout_ms=2**31 - 1)
        time.sleep(0.05)
        client.engine.start()
        client.wait_for("late", "error")
        assert "deadline of 20 ms (timeout_ms) passed after 0 tokens" in client.events["late"][-1].error
        assert [e.kind for e in client.events["late"]] == ["error"]
        client.wait_for("in time", "finished")
        client.submit("running", max_tokens=4000, timeout_ms=200)
        client.wait_for("running", "error")
        tokens = sum(len(e.token_ids) for e in client.events["running"])
        assert f"after {tokens} tokens" in client.events["running"][-1].error and tokens > 0
        status = client.engine.status()
        assert status["counters"]["timeouts"] == 2 and status["running"] == status["waiting"] == 0
        client.engine.close()


def test_a_snapshot_never_changes_and_has_every_counter(client: Client) -> None:
    first = client.engine.snapshot()
    assert (first.state, first.running, first.counters["preemptions"]) == ("running", 0, 0)
    client.engine.start()
    client.submit("a", max_tokens=30)
    client.wait_for("a", "finished")
    client.engine.close()
    last = client.engine.snapshot()
    assert first.counters["steps"] == 0 and last.counters["steps"] >= 30
    assert (last.state, last.running, last.waiting) == ("closed", 0, 0)
    assert last.cache["capacity"] == 4096 and last.taken > first.taken
