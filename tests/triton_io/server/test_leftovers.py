"""Regions and processes of dead servers go, those of live ones stay."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from irminsul_backend.triton_io.server import leftovers
from irminsul_backend.triton_io.server.leftovers import SUPERVISOR_VARIABLE, owned, remove_leftovers


@pytest.fixture(autouse=True)
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of /dev/shm."""
    monkeypatch.setattr(leftovers, "SHM", tmp_path)
    return tmp_path


@pytest.fixture
def orphan() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the server `irminsul-dead-`."""
    env = {**os.environ, SUPERVISOR_VARIABLE: "irminsul-dead- 3 4 5"}
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env)
    yield process
    process.kill()
    process.wait()


def test_the_owner_removes_its_own_in_the_end(shm: Path) -> None:
    (shm / "irminsul-other-region").touch()
    with owned("irminsul-mine-"):
        (shm / "irminsul-mine-region").touch()
    assert [path.name for path in shm.iterdir()] == ["irminsul-other-region"]


def test_a_live_owners_regions_stay(shm: Path) -> None:
    with owned("irminsul-mine-"):
        (shm / "irminsul-mine-region").touch()
        remove_leftovers()
        assert (shm / "irminsul-mine-region").exists()
        assert (shm / "irminsul-mine-owner").exists()


def test_a_dead_owners_regions_and_processes_go(shm: Path, orphan: subprocess.Popen[bytes]) -> None:
    for name in ("irminsul-dead-owner", "irminsul-dead-region1", "irminsul-dead-region2", "irminsul-unknown-region"):
        (shm / name).touch()
    remove_leftovers()
    orphan.wait(10)  # raises if it lives
    assert [path.name for path in shm.iterdir()] == ["irminsul-unknown-region"]  # no owner's file: not known to be dead


def test_owners_that_come_while_others_clean_up(shm: Path) -> None:
    """A new owner's file is unlocked for a moment; whoever removes it then must not leave the owner without one."""
    done = threading.Event()

    def clean() -> None:
        while not done.is_set():
            remove_leftovers()

    cleaners = [threading.Thread(target=clean) for _ in range(2)]
    for cleaner in cleaners:
        cleaner.start()
    try:
        for n in range(200):
            with owned(f"irminsul-{n}-"):
                assert (shm / f"irminsul-{n}-owner").exists()
    finally:
        done.set()
        for cleaner in cleaners:
            cleaner.join()
