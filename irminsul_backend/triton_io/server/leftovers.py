"""Removes what a server that was killed left behind: regions in /dev/shm, and processes.

The supervisor of a server holds a lock on the file `PREFIXowner` for as long as it lives. The kernel releases a lock
however its holder ends, and it means the same in every container that shares /dev/shm; process ids do neither. So a
lock that can be had belongs to a server that is no more.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

SHM = Path("/dev/shm")
OWNER = "owner"
SUPERVISOR_VARIABLE = "IRMINSUL_SUPERVISOR"
"""In the environment of tritonserver and its stubs; its value begins with the server's prefix."""


@contextlib.contextmanager
def owned(prefix: str) -> Iterator[None]:
    """Own the regions whose names begin with `prefix`, and remove them in the end."""
    lock = _lock_new(SHM / f"{prefix}{OWNER}")
    try:
        yield
    finally:
        _remove_regions(prefix)
        os.close(lock)


def remove_leftovers() -> None:
    """End the processes and remove the regions of every server whose supervisor is dead. Others' are left alone."""
    for owner in SHM.glob(f"irminsul-*-{OWNER}"):
        try:
            lock = os.open(owner, os.O_RDONLY)
        except OSError:
            continue  # another user's, or just removed
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            prefix = owner.name.removesuffix(OWNER)
            _end_processes(prefix)
            _remove_regions(prefix)
        except BlockingIOError:
            continue  # its server lives
        finally:
            os.close(lock)


def _lock_new(owner: Path) -> int:
    """Create and lock a file. A server that starts meanwhile may take it for a leftover before it is locked."""
    while True:
        lock = os.open(owner, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        with contextlib.suppress(FileNotFoundError):
            if os.fstat(lock).st_ino == owner.stat().st_ino:
                return lock
        os.close(lock)


def _end_processes(prefix: str) -> None:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(SUPERVISOR_VARIABLE, "").startswith(prefix):
                process.kill()
                process.wait(timeout=5)


def _remove_regions(prefix: str) -> None:
    """The owner's file goes last: without it nobody would know of the others."""
    for region in sorted(SHM.glob(f"{prefix}*"), key=lambda path: path.name == f"{prefix}{OWNER}"):
        with contextlib.suppress(OSError):
            region.unlink()
