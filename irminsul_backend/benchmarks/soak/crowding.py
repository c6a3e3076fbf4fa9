"""Cases in which one client takes so much that another might notice."""

from __future__ import annotations

import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from irminsul_client import Client, IrminsulClientError

from irminsul_backend.benchmarks.soak.desk import Desk
from irminsul_backend.benchmarks.soak.harness import Clock, milliseconds
from irminsul_backend.benchmarks.soak.wire import Http, Wire


@contextmanager
def beside(act: Callable[[], object]) -> Iterator[None]:
    """`act` again and again on a thread of its own."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=60)


def hellos(desk: Desk, count: int = 40) -> float:
    """The 95th percentile of the time to answer a small request."""
    took: list[float] = []
    clock = Clock(30)
    while len(took) < count and (clock.running or len(took) < 3):
        began = time.monotonic()
        desk.ids(text="Hello", max_tokens=1)
        took.append(time.monotonic() - began)
    return statistics.quantiles(took, n=20)[-1]


def text_beside(size: int, desk: Desk) -> str:
    quiet = hellos(desk)
    other = Wire(desk.watched.grpc)
    with beside(lambda: other.ask("irminsul", session=uuid.uuid4().hex, text_input=_text(size), max_tokens=1)):
        loaded = hellos(desk)
    other.close()
    found = f"p95 {milliseconds(loaded)} beside it, {milliseconds(quiet)} without ({loaded / quiet:.1f} times)"
    desk.soak.say(f"small requests beside texts of {size:,} bytes: {found}")
    return "" if loaded <= 3 * quiet else found


def _text(size: int) -> str:
    head = uuid.uuid4().hex  # no memory of a former text may help
    return (head + " order of parcels and invoices 7231" * (size // 32 + 1))[:size]


def many_stop_words(desk: Desk) -> str:
    """256 stop words of 1,024 bytes: time per token at most 3 times that of 1"""
    text = desk.client.generate(text="the order lacks a signature", max_tokens=60, ignore_eos=True).text
    like_it = (text * (1020 // max(1, len(text)) + 1))[:1000]  # each begins as the answer does, and ends otherwise
    times = []
    for count in (1, 256):
        words = [f"{like_it}{n:04}" for n in range(count)]
        began = time.monotonic()
        desk.ids(max_tokens=60, stop_words=words)
        times.append(time.monotonic() - began)
    return "" if times[1] <= 3 * times[0] else f"{milliseconds(times[1])} instead of {milliseconds(times[0])}"


def long_answers(desk: Desk) -> str:
    """64 requests of 30,000 tokens at once: a small one is still answered within 10 s"""
    wire = Wire(desk.watched.grpc)
    with Client(desk.watched.grpc) as greedy:
        streams = [
            greedy.stream(text=f"a long story {n}", max_tokens=30_000, ignore_eos=True, cache_salt="long")
            for n in range(64)
        ]
        threads = [threading.Thread(target=_drain, args=(stream,), daemon=True) for stream in streams]
        for thread in threads:
            thread.start()
        time.sleep(2)
        reply = wire.ask("irminsul", session=uuid.uuid4().hex, timeout=10, text_input="Hello", max_tokens=1)
    for thread in threads:
        thread.join(timeout=30)
    wire.close()
    if reply.hung:
        return "no answer within 10 s"
    return reply.error[:160]


def _drain(stream: Iterator[object]) -> None:
    try:
        for _ in stream:
            pass
    except IrminsulClientError:
        pass  # refused, or cancelled by the closing client


def abandoned(desk: Desk) -> str:
    """/generate_stream with stream false, closed by its client: decoding ends"""
    before = desk.watched.metric("irminsul_requests_total", "cancelled")
    impatient = Http(desk.watched.http, timeout=1.0)
    body = {"text_input": "for nobody", "max_tokens": 8000, "ignore_eos": True, "stream": False}
    impatient.post("/v2/models/irminsul_generate/generate_stream", body)
    clock = Clock(3)
    while clock.running:
        if desk.watched.metric("irminsul_requests_total", "cancelled") > before:
            return ""
        time.sleep(0.1)
    return "still decoding 3 s after its client had gone"
