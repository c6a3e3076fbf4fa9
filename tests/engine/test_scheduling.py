"""Who runs, who waits and who gives way, in a running engine; and that giving way changes no answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from irminsul_backend.protocol import Event

Text = Callable[[int], np.ndarray]


def wait_for(pending: Any, kind: str, count: int = 1) -> None:
    deadline = time.monotonic() + 60
    while sum(e.kind == kind for e in pending.events) < count:
        assert time.monotonic() < deadline, f"no {kind} event"
        time.sleep(0.001)


class Order:
    """Records in which order requests begin and end, and can hold the engine's thread until all have been submitted."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ended: list[str] = []
        self.held = threading.Event()
        self.all_ended = threading.Semaphore(0)

    def watch(self, name: str) -> Callable[[Event], None]:
        def on_event(event: Event) -> None:
            if event.kind == "admitted":
                self.begun.append(name)
                self.held.wait(60)
            if event.kind in ("finished", "error"):
                assert not event.error
                self.ended.append(name)
                self.all_ended.release()

        return on_event

    def release(self, count: int) -> None:
        self.held.set()
        for _ in range(count):
            assert self.all_ended.acquire(timeout=60)


class TestPreemption:
    @pytest.mark.parametrize(
        ("reuse", "sampling"),
        [
            ("off", {}),
            ("exact", {"temperature": 0.9, "seed": 7}),
            ("content", {"temperature": 1.0, "seed": 8, "frequency_penalty": 1.0, "repetition_penalty": 1.3}),
        ],
    )
    def test_the_answer_is_that_of_an_undisturbed_run(self, harness, text: Text, reuse: str, sampling: dict) -> None:
        """Answers outgrow a pool that holds half of them: all finish, each token comes once, none is another."""
        prompts = [text(30 + 7 * i) for i in range(4)]
        quiet = harness("deep", capacity=8192)
        expected = [quiet.run(p, "off", max_tokens=80, sampling=sampling, salt=str(i)) for i, p in enumerate(prompts)]
        tight = harness("deep", capacity=240)
        pending = [tight.submit(p, reuse, max_tokens=80, sampling=sampling, salt=str(i)) for i, p in enumerate(prompts)]
        results = [one.result() for one in pending]
        assert [r.tokens for r in results] == [e.tokens for e in expected]
        for result, undisturbed in zip(results, expected, strict=True):
            np.testing.assert_allclose(result.log_probs, undisturbed.log_probs, atol=2e-4)
            assert sum(e.kind == "admitted" for e in result.events) == 1
        counters = tight.status()["counters"]
        assert counters["preemptions"] == sum(r.usage.preemptions for r in results) > 0
        assert results[0].usage.preemptions == 0, "the oldest never gives way"

    def test_all_that_fit_alone_finish(self, harness, text: Text) -> None:
        """Each needs the whole pool in the end."""
        served = harness("one", capacity=120)
        pending = [served.submit(text(20), max_tokens=101) for _ in range(4)]
        assert [len(one.result().tokens) for one in pending] == [101] * 4

    def test_what_an_answer_might_need_is_not_taken_in_advance(self, harness, text: Text) -> None:
        """Eight requests that could each fill the pool run at once."""
        served = harness("one", capacity=2000)
        pending = [served.submit(text(20), max_tokens=1900) for _ in range(8)]
        for one in pending:
            wait_for(one, "tokens")
        assert served.status()["running"] == 8
        for one in pending:
            served.engine.stop(one.key)
            one.result()

    def test_stopping_one_that_gave_way(self, harness, text: Text) -> None:
        served = harness("one", max_running=1)
        running = served.submit(text(30), max_tokens=3000)
        wait_for(running, "tokens", 3)
        urgent = served.submit(text(30), max_tokens=2000, priority=1)
        wait_for(urgent, "tokens")
        assert served.engine.stop(running.key)
        result = running.result()
        assert result.finish_reason == "cancelled" and result.usage.preemptions == 1
        assert result.usage.completion_tokens == len(result.tokens) >= 3
        served.engine.stop(urgent.key)
        urgent.result()


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_load_deadlocks_or_changes_an_answer(harness, data: st.DataObject) -> None:
    """Random prompts, lengths, priorities, namespaces and cancels in a tiny pool, against each request alone."""
    served = harness("one", capacity=100, max_running=data.draw(st.integers(1, 6)), max_batch_tokens=32)
    one = st.tuples(st.integers(1, 60), st.integers(1, 40), st.integers(-1, 1), st.sampled_from("abc"), st.booleans())
    shared = np.random.default_rng(data.draw(st.integers(0, 99))).integers(2, 500, 60)
    pending = []
    for length, max_tokens, priority, salt, cancel in data.draw(st.lists(one, min_size=1, max_size=8)):
        fields = {"max_tokens": max_tokens, "salt": salt}
        pending.append((shared[:length], fields, served.submit(shared[:length], priority=priority, **fields)))
        if cancel:
            served.engine.stop(pending[-1][2].key)
    for prompt, fields, request in pending:
        result = request.result()
        alone = served.run(prompt, **fields)
        assert result.tokens == alone.tokens[: len(result.tokens)]
        assert result.finish_reason == "cancelled" or len(result.tokens) == fields["max_tokens"]
    served.engine._core.cache.check_integrity()


class TestFairness:
    def test_a_namespace_does_not_wait_for_the_requests_of_another(self, harness, text: Text) -> None:
        """Not even for those that run, if they are several."""
        served, order = harness("one", max_running=2), Order()
        for i in range(10):
            served.submit(text(30), max_tokens=20, salt="many", on_event=order.watch(f"many {i}"))
        served.submit(text(30), max_tokens=2, salt="few", on_event=order.watch("few"))
        order.release(11)
        assert order.ended[0] == "few"

    def test_priority_first(self, harness, text: Text) -> None:
        served, order = harness("one", max_running=1), Order()
        for i, priority in enumerate((0, 0, 5, -5, 9)):
            name = f"{priority} {i}"
            served.submit(text(30), max_tokens=10, priority=priority, session="s", on_event=order.watch(name))
        order.release(5)
        assert order.ended == ["9 4", "5 2", "0 0", "0 1", "-5 3"]

    def test_equal_requests_do_not_displace_each_other(self, harness, text: Text) -> None:
        served, order = harness("one", max_running=2), Order()
        for i in range(6):
            served.submit(text(30), max_tokens=10, salt=str(i % 3), on_event=order.watch(str(i)))
        order.release(6)
        assert sorted(order.ended) == [str(i) for i in range(6)]
        assert served.status()["counters"].get("preemptions", 0) <= 1

    def test_a_short_prompt_passes_a_long_one(self, harness, text: Text) -> None:
        served, order = harness("one", max_batch_tokens=64), Order()
        served.submit(text(2000), max_tokens=1, on_event=order.watch("long"))
        for i in range(3):
            served.submit(text(1000), max_tokens=1, on_event=order.watch(f"long {i}"))
        served.submit(text(10), max_tokens=1, on_event=order.watch("short"))
        order.release(5)
        assert order.ended[0] == "short"

    def test_prompts_go_on_however_many_decode(self, harness, text: Text) -> None:
        """More sequences decode than a step has tokens for: a prompt is computed all the same, and all go on."""
        served = harness("one", max_batch_tokens=16, max_running=64)
        talkers = [served.submit(text(4), max_tokens=3000) for _ in range(20)]
        for one in talkers:
            wait_for(one, "tokens")
        late = served.submit(text(200), max_tokens=1)
        late.result()
        before = [len(one.events) for one in talkers]
        for one, count in zip(talkers, before, strict=True):
            wait_for(one, "tokens", count + 2)
        for one in talkers:
            served.engine.stop(one.key)
            indices = [e.index for e in one.result().events]
            assert all(b == a + 1 for a, b in pairwise(indices))
