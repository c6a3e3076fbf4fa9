"""`kill -9` of each process under load: the server stops being ready, no client waits for ever, nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from irminsul_client import Client, IrminsulClientError

from irminsul_backend.benchmarks.soak.harness import Clock, Row, Soak, share
from irminsul_backend.benchmarks.soak.life import Life
from irminsul_backend.benchmarks.soak.serving import free_ports
from irminsul_backend.benchmarks.soak.wire import Http
from irminsul_backend.triton_io.server.addresses import LOCALHOST, Ports

STUBS = ("irminsul_chunker", "irminsul_engine", "irminsul_detokenizer", "irminsul_generate", "irminsul_unary")
VICTIMS = ("launcher", "supervisor", "tritonserver", *STUBS)
READY_SECONDS, CLIENT_SECONDS = 2.0, 10.0
QUEUED = 100
REQUEST = {"max_tokens": 400, "ignore_eos": True}


class Load:
    """Clients that stream and one over HTTP, each until its first failure."""

    def __init__(self, ports: Ports, streams: int = 3) -> None:
        self._ports = ports
        self._stop = threading.Event()
        self.answered = 0
        self._threads = [threading.Thread(target=self._stream, daemon=True) for _ in range(streams)]
        self._threads.append(threading.Thread(target=self._post, daemon=True))
        for thread in self._threads:
            thread.start()

    def _stream(self) -> None:
        with Client(f"{LOCALHOST}:{self._ports.grpc}", timeout=60) as client:
            while not self._stop.is_set():
                try:
                    for _ in client.stream(text="one of many", max_tokens=400, ignore_eos=True):
                        self.answered += 1
                except IrminsulClientError:
                    return

    def _post(self) -> None:
        http = Http(f"http://{LOCALHOST}:{self._ports.http}", timeout=60)
        body = {"text_input": "one of many", **REQUEST}
        while not self._stop.is_set() and http.post("/v2/models/irminsul_unary/generate", body)[0] == 200:
            self.answered += 1
        http.close()

    def waiting(self, seconds: float) -> int:
        """Clients that still wait for an answer after so long."""
        self._stop.set()
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return sum(thread.is_alive() for thread in self._threads)


@dataclass
class Found:
    """What became of the servers that were killed, by the process that was."""

    late: Counter[str] = field(default_factory=Counter)
    waiting: Counter[str] = field(default_factory=Counter)
    left: dict[str, list[str]] = field(default_factory=dict)
    worst: float = 0.0

    def kill(self, victim: str, life: Life) -> None:
        """Kill one of its processes under load, and wait for the end of it all."""
        load = Load(life.ports)
        time.sleep(1.5)
        os.kill(life.processes[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        while life.ready() and time.monotonic() - killed < READY_SECONDS + 5:
            time.sleep(0.02)
        took = time.monotonic() - killed
        self.worst = max(self.worst, took)
        self.late[victim] += took > READY_SECONDS
        self.waiting[victim] += load.waiting(CLIENT_SECONDS)
        if load.answered == 0:
            raise RuntimeError("no client was answered before the kill, so there was no load")
        with contextlib.suppress(subprocess.TimeoutExpired):
            life.process.wait(timeout=15)

    def look(self, victim: str, life: Life) -> None:
        """What is left of it, once the next server has started; nothing of it may disturb that one."""
        if remains := life.left():
            self.left[victim] = remains
        life.end()


def kills(soak: Soak) -> Iterator[Row]:
    """Each round starts a server on the same ports, so that it also says whether the former one has left them."""
    wanted, clock = soak.count(20, least=2), Clock(soak.seconds(240, least=40))
    ports, log = free_ports(), soak.found / "kills.log"
    found = Found()
    former = VICTIMS[0], Life(ports, log)
    found.kill(*former)
    reached = 1
    while reached < wanted and clock.running:
        victim, life = VICTIMS[reached % len(VICTIMS)], Life(ports, log)
        found.look(*former)
        found.kill(victim, life)
        soak.say(f"{victim}: {found.waiting[victim]} clients wait; not ready after {found.worst:.2f} s at most")
        former = victim, life
        reached += 1
    last = Life(ports, log)
    found.look(*former)
    queued = _terminated(last)
    found.look("SIGTERM", last)
    all_killed = reached >= min(wanted, len(VICTIMS))
    yield Row("kill -9 of each process under load", "each at least once", share(reached, wanted), all_killed)
    late = _counts(found.late)
    measured = f"worst {found.worst:.2f} s; late: {late or 'none'}"
    yield Row("ready", f"false within {READY_SECONDS:g} s", measured, not late)
    waits = _counts(found.waiting)
    yield Row("clients that still wait after 10 s", "none", waits or "none", not waits)
    remains_of = "; ".join(f"after {name}: {', '.join(what)}" for name, what in found.left.items())
    yield Row(
        "left after the next start", "no process, nothing in /dev/shm", remains_of[:400] or "nothing", not found.left
    )
    yield Row(f"SIGTERM with {QUEUED} requests queued", "each gets a last word", f"{queued} wait for ever", not queued)


def _counts(counts: Counter[str]) -> str:
    return "; ".join(f"{name}: {count}" for name, count in counts.items() if count)


def _terminated(life: Life) -> int:
    """Clients that still wait after an orderly stop with more requests than the server can run."""
    load = Load(life.ports, QUEUED)
    time.sleep(1)
    life.process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        life.process.wait(timeout=60)
    return load.waiting(CLIENT_SECONDS)
