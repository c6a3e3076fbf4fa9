"""A stub's ties to its supervisor, with real pipes and processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from irminsul_backend.triton_io.server.lifeline import CUT_OFF, FINISHED, Lines, follow_supervisor, to_variable

IMPORT = "from irminsul_backend.triton_io.server.lifeline import follow_supervisor\n"
HOLDS_THE_LOCK = """
import ctypes
follow_supervisor()
print("follows", flush=True)
ctypes.PyDLL(None).sleep(600)  # with the interpreter lock held
"""


@pytest.fixture
def pipes() -> Iterator[tuple[Lines, Lines]]:
    """The stub's ends and the supervisor's."""
    theirs, ours = zip(os.pipe(), os.pipe(), os.pipe()[::-1], strict=True)
    yield Lines(*theirs), Lines(*ours)
    for line in (*theirs, *ours):
        try:
            os.close(line)
        except OSError:
            continue


def start_stub(lines: Lines, code: str = HOLDS_THE_LOCK) -> subprocess.Popen[str]:
    """A process of its own: the supervisor's end is its end."""
    env = {**os.environ, **to_variable("irminsul-test-", lines)}
    command = [sys.executable, "-c", IMPORT + code]
    return subprocess.Popen(command, pass_fds=lines, env=env, stdout=subprocess.PIPE, text=True)


def test_a_stub_dies_with_its_supervisor_whatever_it_does(pipes: tuple[Lines, Lines]) -> None:
    theirs, ours = pipes
    stubs = [start_stub(theirs) for _ in range(2)]
    for stub in stubs:
        assert stub.stdout is not None and stub.stdout.readline() == "follows\n"
    os.close(ours.life)
    assert [stub.wait(30) for stub in stubs] == [-signal.SIGKILL] * 2


def test_the_supervisor_died_before_the_stub_listened(pipes: tuple[Lines, Lines]) -> None:
    theirs, ours = pipes
    os.close(ours.life)
    assert start_stub(theirs).wait(60) == -signal.SIGKILL


@pytest.mark.parametrize(
    ("drain", "word"), [("lambda: True", FINISHED), ("lambda: False", CUT_OFF), ("lambda: 1 / 0", CUT_OFF)]
)
def test_draining(drain: str, word: bytes, pipes: tuple[Lines, Lines]) -> None:
    theirs, ours = pipes
    stub = start_stub(theirs, f"follow_supervisor({drain}).join()")
    os.close(ours.drain)
    assert stub.wait(60) == 0
    assert os.read(ours.drained, 10) == word


@pytest.mark.parametrize("value", ["", "irminsul-x-", "irminsul-x- a b c", "irminsul-x- 1 2", "irminsul-x- 0 1 999999"])
def test_without_a_supervisor_nothing_happens(value: str) -> None:
    assert follow_supervisor(lambda: True, {"IRMINSUL_SUPERVISOR": value}) is None
