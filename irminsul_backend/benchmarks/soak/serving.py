"""A real server that is watched: whether it lives, what its processes hold, and what the kernel says of them."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import psutil
from irminsul_client import Client, IrminsulClientError

from irminsul_backend.benchmarks.soak.harness import Clock, Soak
from irminsul_backend.benchmarks.soak.wire import Wire
from irminsul_backend.config import ServerConfig
from irminsul_backend.errors import ServerStartError
from irminsul_backend.triton_io.server.addresses import LOCALHOST, Ports, choose_ports
from irminsul_backend.triton_io.server.launcher import Server, start_server

CANARY: dict[str, Any] = {"text_input": "a canary in the mine", "max_tokens": 2, "ignore_eos": True}
CANARY_SECONDS = 10.0
LOOK_SECONDS, PATIENCE_SECONDS = 0.5, 30.0
PORT_RANGE = range(20_000, 32_000)
SEGFAULT = re.compile(r"\[(\d+)\]: segfault|traps: \S+\[(\d+)\] general protection")


class Watched:
    """A server on ports that stay the same when it is started again, for the length of a `with`."""

    def __init__(self, soak: Soak, name: str, config: ServerConfig | None = None) -> None:
        self._soak, self.name = soak, name
        self._config = config or ServerConfig(log_level="WARNING")
        self._ports = free_ports()
        self.deaths: list[str] = []
        """How each server that ended, or stopped answering, did so."""
        self._threads: set[int] = set()
        self._kernel_lines = len(kernel_log())
        self._watching = threading.Event()
        self.server = self._start()

    def _start(self) -> Server:
        server = start_server(self._config, ports=self._ports)
        self._watching.clear()
        threading.Thread(target=self._watch, args=(server,), daemon=True).start()
        return server

    def _watch(self, server: Server) -> None:
        while server.process.poll() is None and not self._watching.wait(LOOK_SECONDS):
            for process in processes(server):
                with contextlib.suppress(psutil.Error):
                    self._threads |= {thread.id for thread in process.threads()}

    @property
    def http(self) -> str:
        return self.server.http_url

    @property
    def grpc(self) -> str:
        return self.server.grpc_url

    def ended(self) -> bool:
        return self.server.process.poll() is not None

    def answers(self) -> bool:
        """Whether a plain request is answered within 10 seconds."""
        if self.ended():
            return False
        wire = Wire(self.grpc)
        reply = wire.ask("irminsul", uuid.uuid4().hex, timeout=CANARY_SECONDS, **CANARY)
        wire.close()
        return len(reply.joined("output_ids")) == 2

    def recover(self, after: str) -> bool:
        """Start the server again if it does not answer; says so, and keeps its log. True if it had to."""
        if self.answers():
            return False
        time.sleep(1.5)  # the supervisor looks once a second
        how = "the server ended" if self.ended() else "the server said ready and answered nothing"
        self.deaths.append(f"{after}: {how}")
        self._soak.say(f"{after}: {how}; it is started again")
        self.keep_log()
        self.server.stop()
        self.server = self._start()
        with Client(self.grpc) as client:  # clients of this process share what they think of the address
            clock = Clock(PATIENCE_SECONDS)
            while clock.running:
                with contextlib.suppress(IrminsulClientError):
                    client.check_ready()
                    break
                time.sleep(0.2)
        return True

    def keep_log(self) -> None:
        path = self._soak.found / f"{self.name}-{len(self.deaths)}.log"
        path.write_text("\n".join(self.server.log) + "\n", encoding="utf-8")

    def log_has(self, *texts: str) -> list[str]:
        """Lines of the server's log, as far back as it is kept, that hold one of `texts`."""
        return [line for line in self.server.log if any(text in line for text in texts)]

    def metric(self, name: str, label: str = "") -> float:
        """A metric's value, summed over its labels that hold `label`."""
        text = httpx.get(self.server.metrics_url, timeout=10).text
        lines = [line for line in text.splitlines() if line.startswith(name) and label in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def resident(self) -> int:
        """Bytes of memory of all its processes."""
        total = 0
        for process in processes(self.server):
            with contextlib.suppress(psutil.Error):
                total += process.memory_info().rss
        return total

    def segfaults(self) -> list[str]:
        """What the kernel's log says of this server's processes and threads since it was made."""
        lines = kernel_log()[self._kernel_lines :]
        found = [(line, match) for line in lines if (match := SEGFAULT.search(line))]
        return [line for line, match in found if int(match[1] or match[2]) in self._threads]

    def stop(self) -> None:
        self._watching.set()
        self.server.stop()

    def __enter__(self) -> Watched:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()


def free_ports() -> Ports:
    """Ports that no outgoing connection is given, so that a server can have the same ones when it starts again."""
    while True:
        with contextlib.suppress(ServerStartError):
            return choose_ports(LOCALHOST, Ports(*random.SystemRandom().sample(PORT_RANGE, 3)))


def processes(server: Server) -> list[psutil.Process]:
    """The supervisor, tritonserver and the stubs."""
    try:
        root = psutil.Process(server.process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def kernel_log() -> list[str]:
    """Lines of dmesg; empty where it may not be read."""
    try:
        done = subprocess.run(["dmesg"], capture_output=True, text=True, errors="replace", check=False)
    except OSError:
        return []
    return done.stdout.splitlines()


def kernel_log_is_readable() -> bool:
    return bool(kernel_log())


def shared_memory(prefix: str) -> list[str]:
    """Regions of a server that are left."""
    return sorted(path.name for path in Path("/dev/shm").glob(f"{prefix}*"))
