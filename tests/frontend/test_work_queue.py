"""Small items first, lanes in order, a bounded queue, and nothing that waits for ever."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_backend.errors import OverloadedError, UnavailableError
from irminsul_backend.frontend import work_queue
from irminsul_backend.frontend.work_queue import LARGE_BYTES, MAX_ITEMS, WorkQueue

TIMEOUT_S = 10


class Bench:
    """A queue whose items wait until a test lets them go."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.begun: list[str] = []
        self.changed = threading.Condition()
        self.gates: defaultdict[str, threading.Event] = defaultdict(threading.Event)
        self.queue: WorkQueue[str] = WorkQueue(self._work, max_bytes, large_at_once=1)

    def _work(self, item: str) -> None:
        with self.changed:
            self.begun.append(item)
            self.changed.notify_all()
        if not item.startswith("free"):
            assert self.gates[item].wait(TIMEOUT_S)

    def wait(self, count: int) -> list[str]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.begun) >= count, TIMEOUT_S)
            return list(self.begun)


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    for gate in list(bench.gates.values()):
        gate.set()
    bench.queue.close()


def test_a_small_item_never_waits_for_large_ones(bench: Bench) -> None:
    for n in range(5):
        bench.queue.submit(f"large {n}", LARGE_BYTES)
    assert bench.wait(1) == ["large 0"]
    bench.queue.submit("free small", 10)
    assert bench.wait(2) == ["large 0", "free small"]


def test_the_smallest_of_those_that_wait_is_next(bench: Bench) -> None:
    bench.queue.submit("first", LARGE_BYTES)
    bench.wait(1)
    bench.queue.submit("larger", 1000 * LARGE_BYTES)
    bench.queue.submit("smaller", LARGE_BYTES)
    for item in ("first", "smaller", "larger"):
        bench.gates[item].set()
    assert bench.wait(3) == ["first", "smaller", "larger"]


def test_a_large_item_is_not_overtaken_for_ever(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.queue.submit("first", LARGE_BYTES)
    bench.wait(1)
    bench.queue.submit("larger", 2 * LARGE_BYTES)
    later = work_queue.time.monotonic() + 60
    monkeypatch.setattr(work_queue.time, "monotonic", lambda: later)
    bench.queue.submit("smaller", LARGE_BYTES)
    for item in ("first", "smaller", "larger"):
        bench.gates[item].set()
    assert bench.wait(3) == ["first", "larger", "smaller"]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["a", "b", None]), st.sampled_from([1, 999, LARGE_BYTES])), max_size=40))
def test_a_lane_is_worked_on_in_order_and_nothing_is_lost(items: list[tuple[str | None, int]]) -> None:
    done: list[int] = []
    running: set[str] = set()
    lock, ended = threading.Lock(), threading.Semaphore(0)

    def work(number: int) -> None:
        lane = items[number][0]
        with lock:
            assert lane not in running
            if lane:
                running.add(lane)
            done.append(number)
        with lock:
            running.discard(lane or "")
        ended.release()

    queue: WorkQueue[int] = WorkQueue(work, 1 << 30)
    for number, (lane, size) in enumerate(items):
        queue.submit(number, size, lane)
    assert all(ended.acquire(timeout=TIMEOUT_S) for _ in items)
    assert queue.close() == []
    assert sorted(done) == list(range(len(items)))
    for lane in ("a", "b"):
        numbers = [number for number in done if items[number][0] == lane]
        assert numbers == sorted(numbers)
    assert not queue._lanes


def test_bytes_and_items_are_bounded() -> None:
    bench = Bench(max_bytes=100)
    bench.queue.submit("first", 1000)  # alone, whatever its size
    with pytest.raises(OverloadedError, match=r"1 prompts of 1000 bytes wait .* at most 4096 and 100 bytes") as refused:
        bench.queue.submit("second", 1)
    assert refused.value.retry_after_s == 1
    bench.gates["first"].set()
    bench.queue.close()
    with pytest.raises(UnavailableError, match="shutting down"):
        bench.queue.submit("third", 1)


def test_many_items_are_refused(bench: Bench) -> None:
    bench.queue.submit("head", 1, lane="a")
    for _ in range(MAX_ITEMS - 1):
        bench.queue.submit("free", 0, lane="a")
    with pytest.raises(OverloadedError, match="4096 prompts"):
        bench.queue.submit("one too many", 0)


def test_what_raises_is_logged_and_the_lane_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    done = threading.Event()

    def work(item: str) -> None:
        if item == "bad":
            raise RuntimeError("defect")
        done.set()

    queue: WorkQueue[str] = WorkQueue(work, 100)
    queue.submit("bad", 1, lane="a")
    queue.submit("good", 1, lane="a")
    assert done.wait(TIMEOUT_S)
    queue.close()
    assert "defect" in caplog.text


def test_close_returns_what_nobody_works_on_in_order(bench: Bench) -> None:
    bench.queue.submit("large", LARGE_BYTES)
    bench.wait(1)
    for item, lane in (("a", "x"), ("b", "x"), ("c", None)):
        bench.queue.submit(item, LARGE_BYTES, lane)
    threading.Timer(0.05, bench.gates["large"].set).start()
    assert bench.queue.close() == ["a", "b", "c"]
