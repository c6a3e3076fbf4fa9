"""Turns: priority first, then namespaces and sessions by the tokens that were computed for them."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_backend.engine.fair_queue import FairQueue
from irminsul_backend.engine.token_budget import LEAST_SLICE, TokenBudget


@dataclass(eq=False)
class Item:
    flow: tuple[str, str]
    arrival: float
    cost: int = 10
    priority: int = 0


class Queue:
    """A queue that serves one request after another."""

    def __init__(self) -> None:
        self.queue: FairQueue[Item] = FairQueue()
        self._clock = itertools.count()

    def add(self, namespace: str, session: str = "", **fields) -> Item:
        item = Item((namespace, session), next(self._clock), **fields)
        self.queue.join(item)
        self.queue.push(item)
        return item

    def serve(self) -> Item:
        item = next(self.queue.heads())
        self.queue.remove(item)
        self.queue.charge(item, item.cost)
        self.queue.leave(item)
        return item


def test_one_small_request_does_not_wait_for_a_thousand() -> None:
    queue = Queue()
    for i in range(1000):
        queue.add("many", f"session {i}", cost=500)
    for _ in range(10):
        queue.serve()
    small = queue.add("few", cost=5)
    assert small in [queue.serve() for _ in range(2)]


def test_sessions_of_a_namespace_take_turns() -> None:
    queue = Queue()
    for _ in range(100):
        queue.add("n", "chatty", cost=50)
    quiet = queue.add("n", "quiet")
    assert quiet in [queue.serve() for _ in range(2)]


def test_shares_are_counted_in_tokens() -> None:
    """Two namespaces that always want more get the same number of tokens, whatever the size of their requests."""
    queue, served = Queue(), Counter()
    for _ in range(2000):
        queue.add("large", cost=1000)
        queue.add("small", cost=10)
    for _ in range(1000):
        item = queue.serve()
        served[item.flow[0]] += item.cost
    assert abs(served["large"] - served["small"]) <= 1000


def test_priority_goes_first_and_order_of_arrival_holds_in_a_session() -> None:
    queue = Queue()
    items = [queue.add("n", "s", priority=p) for p in (0, 5, 0, -3, 5)]
    assert [queue.serve() for _ in items] == [items[i] for i in (1, 4, 0, 2, 3)]


def test_a_flood_of_new_sessions_does_not_starve_an_old_one() -> None:
    """Every new session is entitled to a turn, and yet the one that has had much gets its next in bounded time."""
    queue = Queue()
    old = queue.add("n", "old", cost=5000)
    queue.serve()
    old = queue.add("n", "old")
    for i in range(10):
        queue.add("n", f"new {i}", cost=100)
    for i in range(10, 10_000):
        queue.add("n", f"new {i}", cost=100)
        if queue.serve() is old:
            break
    assert i < 2000


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_everything_is_served_once_and_nothing_is_left(data: st.DataObject) -> None:
    """Random joins, turns, preemptions and cancels: order within a session holds, no account is left."""
    queue = Queue()
    waiting: list[Item] = []
    running: list[Item] = []
    fields = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.integers(0, 900), st.integers(-1, 1))
    for action in data.draw(st.lists(st.sampled_from(("add", "add", "run", "end", "preempt", "cancel")), max_size=60)):
        if action == "add":
            namespace, session, cost, priority = data.draw(fields)
            waiting.append(queue.add(namespace, session, cost=cost, priority=priority))
        elif action == "run" and waiting:
            heads = list(queue.queue.heads())
            assert {id(h) for h in heads} <= {id(w) for w in waiting} and len(heads) == len(set(map(id, heads)))
            item = heads[0]
            assert item.priority == max(w.priority for w in waiting)
            same = [w for w in waiting if (w.flow, w.priority) == (item.flow, item.priority)]
            assert item.arrival == min(w.arrival for w in same)
            queue.queue.remove(item)
            queue.queue.charge(item, item.cost)
            waiting.remove(item)
            running.append(item)
        elif action == "end" and running:
            queue.queue.leave(running.pop(data.draw(st.integers(0, len(running) - 1))))
        elif action == "preempt" and running:
            latest = max(running, key=lambda r: r.arrival)
            running.remove(latest)
            queue.queue.push(latest, front=True)
            waiting.append(latest)
        elif action == "cancel" and waiting:
            item = waiting.pop(data.draw(st.integers(0, len(waiting) - 1)))
            queue.queue.remove(item)
            queue.queue.leave(item)
        assert len(queue.queue) == len(waiting)
    for item in running:
        queue.queue.leave(item)
    while waiting:
        waiting.remove(queue.serve())
    assert len(queue.queue) == 0 and not list(queue.queue.heads()) and not queue.queue._waiting


class TestTokenBudget:
    @pytest.mark.parametrize("most", [1, 2, 3, 100, 128, 1024])
    def test_prompts_and_answers_always_go_on(self, most: int) -> None:
        """However slow the steps and however many sequences decode, both get a share and the step's limit holds."""
        budget = TokenBudget(most, target_s=0.05)
        for seconds in [1.0] * 12 + [0.001] * 12:
            for decoding in (0, 1, 5, 64, 128, 5000):
                allowed = min(decoding, budget.max_decoding(prefilling=True))
                assert (allowed > 0) == (decoding > 0)
                prefill = budget.prefill(allowed)
                assert prefill >= 1 and allowed + prefill <= max(2, most)
                assert budget.max_decoding(prefilling=False) == most
            budget.adapt(seconds)

    def test_it_follows_the_duration_of_a_step(self) -> None:
        budget = TokenBudget(1024, target_s=0.05)
        for _ in range(10):
            budget.adapt(0.06)
        assert budget.prefill(1) == LEAST_SLICE - 1
        budget.adapt(0.03)
        assert budget.prefill(1) == LEAST_SLICE - 1
        for _ in range(10):
            budget.adapt(0.02)
        assert budget.prefill(1) == 1023
