"""One `irminsul serve` with all its processes, which a test may kill."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil

from irminsul_backend.benchmarks.soak.serving import shared_memory
from irminsul_backend.triton_io.server.addresses import LOCALHOST, Ports

START_SECONDS = 60.0


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
            return bool(httpx.get(f"http://{LOCALHOST}:{self.ports.http}/v2/health/ready", timeout=1).is_success)
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
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    return True
