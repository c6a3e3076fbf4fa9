"""`irminsul serve` in a process of its own, for the tests that end it."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys
import time
from pathlib import Path

import psutil

from irminsul_backend.triton_io.server.addresses import LOCALHOST, is_listening

READY = re.compile(r"irminsul ready: model demo_model, http (\S+):(\d+), grpc (\S+):(\d+), metrics (\S+):(\d+)\n")
FREE = ["--http-port=0", "--grpc-port=0", "--metrics-port=0"]
SERVE = ["serve", "--threads=1", *FREE]
COMMAND = [sys.executable, "-m", "irminsul_backend.commands.main", *SERVE]


def regions(prefix: str) -> set[str]:
    return {path.name for path in Path("/dev/shm").glob(f"{prefix}*")}


class Serving:
    """An `irminsul serve` in a process of its own, and everything that belongs to it."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *flags], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        match = READY.fullmatch(self.line)
        if match is None:
            self.process.kill()
            raise AssertionError(f"not ready: {self.line!r} {self.process.communicate()}")
        self.ports = [int(match[n]) for n in (2, 4, 6)]
        self.grpc_url = f"{match[3]}:{match[4]}"
        self.family = psutil.Process(self.process.pid).children(recursive=True)
        (supervisor,) = [p for p in self.family if any("triton_io.server.supervisor" in part for part in p.cmdline())]
        self.supervisor = supervisor
        self.prefix = next(part for part in supervisor.cmdline() if part.startswith("irminsul-"))

    def assert_nothing_left(self) -> None:
        gone, alive = psutil.wait_procs(self.family, timeout=30)
        assert not alive
        assert len(gone) >= 6  # the supervisor, tritonserver, the stubs
        assert not any(is_listening(LOCALHOST, port) for port in self.ports)
        assert not regions(self.prefix)

    def find(self, name: str) -> psutil.Process:
        """One of its processes: launcher, supervisor, tritonserver, or a model by its name."""
        if name == "launcher":
            return psutil.Process(self.process.pid)
        if name == "supervisor":
            return self.supervisor
        (found,) = [p for p in self.family if p.name() == name or any(f"/{name}/1/" in part for part in p.cmdline())]
        return found

    def status(self, method: str, path: str) -> int:
        """HTTP status of an answer; 0 if nothing answers."""
        connection = http.client.HTTPConnection(LOCALHOST, self.ports[0], timeout=10)
        try:
            connection.request(method, path, body="{}" if method == "POST" else None)
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def is_ready(self) -> bool:
        return self.status("GET", "/v2/health/ready") == 200

    def wait_not_ready(self) -> None:
        while self.is_ready():
            time.sleep(0.02)
