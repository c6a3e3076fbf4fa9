"""What every check shares: its rows, how far it scales, and where it says what it does."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One line of the table."""

    what: str
    bar: str
    measured: str
    ok: bool


@dataclass
class Soak:
    """One run: the scale of its counts, its folders, and its voice."""

    scale: float
    """1 for the counts of the bars, or a share of them."""
    traces: Path
    found: Path
    """Folder for what brought a server down: server logs and minimal requests."""
    say: Callable[[str], None] = print

    def count(self, full: int, least: int = 1) -> int:
        """`full` repetitions at scale 1."""
        return max(least, round(full * self.scale))

    def seconds(self, full: float, least: float = 1.0) -> float:
        """The time share of a check that takes `full` seconds at scale 1."""
        return max(least, full * self.scale)


Check = Callable[[Soak], Iterator[Row]]


class Clock:
    """The time share of a part: `running` until it is used up, `due` once every so often for progress."""

    def __init__(self, seconds: float, every: float = 15.0) -> None:
        self.began = time.monotonic()
        self._end = self.began + seconds
        self._every, self._next = every, self.began + every

    @property
    def running(self) -> bool:
        return time.monotonic() < self._end

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    def due(self) -> bool:
        if time.monotonic() < self._next:
            return False
        self._next = time.monotonic() + self._every
        return True


def share(reached: int, wanted: int) -> str:
    """How much of a count was reached, so that a table never claims more than was done."""
    return f"{reached:,}" if reached >= wanted else f"{reached:,} of {wanted:,} in the time share"


def enough(reached: int, wanted: int) -> bool:
    """Whether a part got far enough in its time share to say anything, a fiftieth; rows say how far."""
    return reached > 0 and 50 * reached >= wanted


def milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:,.0f} ms"
