"""Runs tritonserver and leaves nothing behind, however the launcher ends: `python -m …supervisor PREFIX COMMAND…`.

Its standard input is a pipe from the launcher. A line `drain SECONDS HOST PORT` lets running requests finish before the
server stops; the end of the pipe (an orderly stop, or the launcher's death) stops it at once. All stubs are descendants
of this process, so it can end those that outlive the server and remove their shared memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil

from irminsul_backend.triton_io.server.leftovers import owned
from irminsul_backend.triton_io.server.lifeline import FINISHED, Lines, to_variable

PATIENCE_SECONDS = 3
"""How long tritonserver may take to stop. It would wait for each session that was never ended, which no one needs."""
LAST_RESPONSES_SECONDS = 0.5
"""Time in which the last responses pass from the engine through the detokenizer to their clients."""
CUT_OFF_CODE = 3
"""Exit code if running requests had to be ended."""
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def prctl(option: int, value: int) -> None:
    """Linux prctl(2)."""
    ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def main(argv: list[str]) -> int:
    """Returns 0 after a stop, CUT_OFF_CODE after one that cut requests off, else how the server ended by itself."""
    prefix, command = argv[0], argv[1:]
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the launcher decides; it says so through the pipe
    with owned(prefix):
        supervised = Supervised(prefix, command)
        try:
            return supervised.run()
        finally:
            end_descendants()


class Supervised:
    """A tritonserver and its stubs."""

    def __init__(self, prefix: str, command: list[str]) -> None:
        theirs, ours = zip(os.pipe(), os.pipe(), os.pipe()[::-1], strict=True)
        lines = Lines(*theirs)
        self._ours = Lines(*ours)
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            pass_fds=lines,
            env={**os.environ, **to_variable(prefix, lines)},
            preexec_fn=_prepare_server,
        )
        for line in lines:
            os.close(line)
        self._stubs = Stubs(self._server.pid)

    def run(self) -> int:
        """Wait until the server ends or is told to; then stop it."""
        code = 0
        while self._lives():
            word = _hear(0)
            if word is None:
                continue
            if word:
                code = 0 if self._drain(*_parse_drain(word)) else CUT_OFF_CODE
            self._stop()
            return code
        ended = self._server.wait()
        return ended if ended >= 0 else 128 - ended

    def _lives(self) -> bool:
        """Whether the server runs with all of its stubs; if one of them died, it is ended."""
        if self._server.poll() is None and (dead := self._stubs.dead()):
            # Triton goes on saying that it is ready, and requests under way would wait for ever.
            print(f"error: the process of {dead} died; the server ends, start it again", file=sys.stderr, flush=True)
            self._server.kill()
            self._server.wait()
        return self._server.poll() is None

    def _drain(self, seconds: float, http: tuple[str, int]) -> bool:
        """Let running requests finish; True if all did.

        At SIGTERM tritonserver accepts no new HTTP connection, so that it is no longer ready, and goes on working while
        an old one is open. When the last one is closed it refuses every request of every model, the next steps of an
        ensemble's running requests included. Hence one connection is held until the engine has finished.
        """
        deadline = time.monotonic() + seconds + 1  # the engine keeps the time; this is for one that does not answer
        with contextlib.suppress(OSError), socket.create_connection(http, timeout=2):
            time.sleep(0.05)  # accepted by then
            self._server.terminate()
            os.close(self._ours.drain)
            while time.monotonic() < deadline and self._lives():
                if select.select([self._ours.drained], [], [], 0.1)[0]:
                    finished = os.read(self._ours.drained, 1) == FINISHED
                    time.sleep(LAST_RESPONSES_SECONDS)
                    return finished
                if _hear(0, wait_s=0) == "":
                    self._server.kill()
        return False

    def _stop(self) -> None:
        self._server.terminate()  # does nothing if it has ended
        try:
            self._server.wait(timeout=PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait()


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


def _hear(descriptor: int, wait_s: float = 0.1) -> str | None:
    """What the launcher says: a line, "" if it has closed the pipe, None if nothing."""
    readable, _, _ = select.select([descriptor], [], [], wait_s)
    return os.read(descriptor, 4096).decode() if readable else None


def _parse_drain(line: str) -> tuple[float, tuple[str, int]]:
    _, seconds, host, port = line.split()
    return float(seconds), (host, int(port))


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
