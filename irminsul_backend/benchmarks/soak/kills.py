"""`kill -9` of each process under load: the server stops being ready, no client waits for ever, nothing is left."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
from irminsul_client import Client, IrminsulClientError

from irminsul_backend.benchmarks.soak.harness import Clock, Row, Soak, share
from irminsul_backend.benchmarks.soak.serving import shared_memory
from irminsul_backend.benchmarks.soak.wire import Http
from irminsul_backend.triton_io.server.launcher import LOCALHOST, Ports, choose_ports

STUBS = ("irminsul_chunker", "irminsul_engine", "irminsul_detokenizer", "irminsul_generate", "irminsul_unary")
VICTIMS = ("launcher", "supervisor", "tritonserver", *STUBS)
READY_SECONDS, CLIENT_SECONDS, START_SECONDS = 2.0, 10.0, 60.0
REQUEST = {"max_tokens": 400, "ignore_eos": True}


class Life:
    """One `irminsul serve`, in a process group of its own, with its processes by name."""

    def __init__(self, ports: Ports, log: Path) -> None:
        self.ports = ports
        flags = [f"--{name}-port={getattr(ports, name)}" for name in ("http", "grpc", "metrics")]
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "irminsul_backend.commands.main", "serve", *flags],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        deadline = time.monotonic() + START_SECONDS
        while not self.ready():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start again: {log.read_text(errors='replace')[-300:]}")
            time.sleep(0.05)
        self.processes = {"launcher": psutil.Process(self.process.pid)}
        self.prefix = ""
        for child in self.processes["launcher"].children(recursive=True):
            words = child.cmdline()
            script = next((w for w in words if w.endswith("/model.py")), "")
            if script:
                name = Path(script).parents[1].name
            elif any(w.endswith("server.supervisor") for w in words):
                name = "supervisor"
            else:
                name = "tritonserver"
            self.processes.setdefault(name, child)
            found = [w.rpartition("=")[2] for w in words if "shm-region-prefix-name=" in w]
            self.prefix = found[0] if found else self.prefix

    def ready(self) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"http://{LOCALHOST}:{self.ports.http}/v2/health/ready", timeout=1).status_code == 200
        return False

    def left(self) -> list[str]:
        """Its processes and shared memory that are still there."""
        alive = [name for name, process in self.processes.items() if process.is_running() and not _is_zombie(process)]
        return [*alive, *shared_memory(self.prefix)]

    def end(self) -> None:
        """Nothing of it may disturb the next life."""
        for process in self.processes.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def _is_zombie(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


class Load:
    """Three clients that stream and one over HTTP, and when each one's last request ended."""

    def __init__(self, ports: Ports) -> None:
        self._ports = ports
        self._stop = threading.Event()
        self.answered = 0
        self._threads = [threading.Thread(target=self._stream, daemon=True) for _ in range(3)]
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


def kills(soak: Soak) -> Iterator[Row]:
    """Each round starts a server on the same ports, so that it also says whether the former one has left them."""
    wanted, clock = soak.count(20, least=2), Clock(soak.seconds(300, least=40))
    ports, log = choose_ports(LOCALHOST, Ports()), soak.found / "kills.log"
    slow: Counter[str] = Counter()
    waiting: Counter[str] = Counter()
    left: dict[str, list[str]] = {}
    former: tuple[str, Life] | None = None
    reached, worst = 0, 0.0
    while reached < wanted and clock.running:
        victim = VICTIMS[reached % len(VICTIMS)]
        life = Life(ports, log)
        if former is not None:
            if remains := former[1].left():
                left[former[0]] = remains
            former[1].end()
        load = Load(ports)
        time.sleep(1.5)
        os.kill(life.processes[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        while life.ready() and time.monotonic() - killed < READY_SECONDS + 5:
            time.sleep(0.02)
        took = time.monotonic() - killed
        worst = max(worst, took)
        slow[victim] += took > READY_SECONDS
        waiting[victim] += load.waiting(CLIENT_SECONDS)
        soak.say(f"{victim}: not ready after {took:.2f} s, {waiting[victim]} clients wait")
        former = victim, life
        if load.answered == 0:
            raise RuntimeError("no client was answered before the kill: the load was none")
        with contextlib.suppress(subprocess.TimeoutExpired):
            life.process.wait(timeout=15)
        reached += 1
    if former is not None:
        last = Life(ports, log)
        if remains := former[1].left():
            left[former[0]] = remains
        last.process.terminate()
        last.process.wait(timeout=30)
        if remains := last.left():
            left["SIGTERM"] = remains
        former[1].end()
    yield Row("kill -9 of each process under load", "all done", share(reached, wanted), reached >= wanted)
    late = "; ".join(f"{name}: {count}" for name, count in slow.items() if count)
    yield Row("ready", f"false within {READY_SECONDS:g} s", f"worst {worst:.2f} s; late: {late or 'none'}", not late)
    waits = "; ".join(f"{name}: {count}" for name, count in waiting.items() if count)
    yield Row("clients that still wait after 10 s", "none", waits or "none", not waits)
    remains_of = "; ".join(f"after {name}: {', '.join(what)}" for name, what in left.items())
    yield Row("left after the next start", "no process, nothing in /dev/shm", remains_of[:400] or "nothing", not left)
