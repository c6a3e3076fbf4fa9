"""Runs tritonserver and leaves nothing behind, however the launcher ends: `python -m …supervisor PREFIX COMMAND…`.

Its standard input is a pipe from the launcher; the end of that pipe (an orderly stop, or the launcher's death) stops
the server. All stubs are its descendants, so it can end those that outlive the server and remove their shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

EXIT_TIMEOUT_SECONDS = 2
"""How long the server waits for requests under way; it also waits this long for each session that was never ended."""
PATIENCE_SECONDS = EXIT_TIMEOUT_SECONDS + 4
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Linux prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main(argv: list[str]) -> int:
    """Returns the server's exit code."""
    prefix, command = argv[0], argv[1:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides; it says so by closing the pipe
    server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_prepare_server)
    try:
        stubs = Stubs(server.pid)
        while server.poll() is None and not _closed(0):
            if dead := stubs.dead():
                # Triton goes on saying that it is ready, and requests under way would wait for ever.
                print(
                    f"error: the process of {dead} died; the server ends, start it again", file=sys.stderr, flush=True
                )
                server.kill()
                server.wait()
        if server.poll() is None:
            server.terminate()
            _wait(server, PATIENCE_SECONDS)
    finally:
        end_descendants()
        remove_shared_memory(prefix)
    code = server.wait()
    return code if code >= 0 else 128 - code


class Stubs:
    """The processes of the Python models, as they were last seen."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._models: dict[int, str] = {}
        self._next_look = 0.0

    def dead(self) -> str:
        """The model whose process is gone, or ""; looks once a second."""
        if time.monotonic() < self._next_look:
            return ""
        self._next_look = time.monotonic() + 1
        alive: dict[int, str] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._server).children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    paths = [a for a in child.cmdline() if a.endswith("/model.py")]
                    if paths and child.status() != psutil.STATUS_ZOMBIE:
                        alive[child.pid] = Path(paths[0]).parents[1].name
        gone = [model for pid, model in self._models.items() if pid not in alive]
        self._models = alive
        return ", ".join(sorted(gone))


def _prepare_server() -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def _closed(descriptor: int) -> bool:
    """Waits up to 0.1 s; True once the other end of the pipe is closed."""
    readable, _, _ = select.select([descriptor], [], [], 0.1)
    return bool(readable) and os.read(descriptor, 4096) == b""


def _wait(server: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        server.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        server.kill()


def end_descendants() -> None:
    """Kill and reap every process below this one."""
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        children = psutil.Process().children(recursive=True)
        if not children:
            return
        for child in children:
            try:
                child.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(children, timeout=1)


def remove_shared_memory(prefix: str) -> None:
    """Remove the regions whose names begin with `prefix`, which is this server's own."""
    for region in Path("/dev/shm").glob(f"{prefix}*"):
        region.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
