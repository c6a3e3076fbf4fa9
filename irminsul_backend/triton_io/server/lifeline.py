"""The stubs' end of the pipes to the supervisor: a stub ends when the supervisor does, and hears when to drain.

The pipes come through tritonserver by inheritance. Triton's stubs do not notice the death of their server; what they
hold would stay. Without a supervisor (plain `tritonserver --model-repository …`) nothing here does anything.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import stat
import threading
from collections.abc import Callable, Mapping
from typing import NamedTuple

from irminsul_backend.triton_io.server.leftovers import SUPERVISOR_VARIABLE


class Lines(NamedTuple):
    """File descriptors of one end of the three pipes."""

    life: int
    """The supervisor keeps it open while it lives."""
    drain: int
    """The supervisor closes it when the server shall drain."""
    drained: int
    """The engine's stub writes to it once it is done: FINISHED, or CUT_OFF if it had to end requests."""


FINISHED, CUT_OFF = b"1", b"0"


def to_variable(prefix: str, lines: Lines) -> dict[str, str]:
    """The environment variable that tells the stubs of `lines`."""
    return {SUPERVISOR_VARIABLE: " ".join((prefix, *map(str, lines)))}


def follow_supervisor(
    drain: Callable[[], bool] | None = None, environ: Mapping[str, str] = os.environ
) -> threading.Thread | None:
    """Tie this stub to its supervisor.

    Args:
        drain: called once, on a thread of its own, when the server shall drain; returns whether every request came to
            its end by itself.

    Returns:
        The thread that waits for the word to drain, if there is one.
    """
    lines = _inherited(environ.get(SUPERVISOR_VARIABLE, ""))
    if lines is None:
        return None
    _die_with(lines.life)
    if drain is None:
        return None
    thread = threading.Thread(target=_wait_to_drain, args=(lines, drain), name="irminsul-drain", daemon=True)
    thread.start()
    return thread


def _inherited(value: str) -> Lines | None:
    """The descriptors that the variable names, unless they are something else in this process."""
    try:
        lines = Lines(*map(int, value.split()[1:]))
        return lines if all(stat.S_ISFIFO(os.fstat(line).st_mode) for line in lines) else None
    except (ValueError, TypeError, OSError):
        return None


def _die_with(pipe: int) -> None:
    """Have the kernel send SIGKILL to this process once the other end of `pipe` is closed.

    No thread has to wake up for it, so it works while the interpreter lock is held; and it is bound to the supervisor,
    not to the thread of tritonserver that made this process, as PR_SET_PDEATHSIG would be.
    """
    own = os.open(f"/proc/self/fd/{pipe}", os.O_RDONLY)  # a description of its own: owner and signal belong to that
    fcntl.fcntl(own, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(own, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(own, fcntl.F_SETFL, fcntl.fcntl(own, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([own], [], [], 0)[0]:  # closed before this process listened
        os.kill(os.getpid(), signal.SIGKILL)


def _wait_to_drain(lines: Lines, drain: Callable[[], bool]) -> None:
    os.read(lines.drain, 1)  # nothing is ever written: it returns when the pipe is closed
    finished = False
    try:
        finished = drain()
    finally:
        os.write(lines.drained, FINISHED if finished else CUT_OFF)
