"""LoadProgress: a bar on a terminal, a line in the log elsewhere, nothing at all for what is loaded at once."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

BAR_AFTER_SECONDS = 1.0
"""A model that is loaded sooner shows no bar."""
LOG_EVERY_SECONDS = 15.0

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # whatever the server's level: a silent start of several minutes looks like a hang


class LoadProgress:
    """Counts the bytes of weights that have been read; a context manager."""

    def __init__(self, total_bytes: int, what: str) -> None:
        self.total, self.what, self.done = total_bytes, what, 0
        self._start = self._logged = time.monotonic()
        self._terminal = sys.stderr.isatty()
        self._bar: Progress | None = None
        self._task = TaskID(0)

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` more have been read."""
        self.done += num_bytes
        now = time.monotonic()
        if not self._terminal:
            if now - self._logged >= LOG_EVERY_SECONDS:
                self._logged = now
                self._log(now)
        elif self._bar is not None:
            self._bar.update(self._task, completed=self.done)
        elif now - self._start >= BAR_AFTER_SECONDS:
            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
                TimeRemainingColumn(), console=Console(stderr=True), transient=True,
            )  # fmt: skip
            self._task = self._bar.add_task(self.what, total=self.total, completed=self.done)
            self._bar.start()

    def _log(self, now: float) -> None:
        seconds = max(now - self._start, 1e-9)
        logger.info(
            "%s: %.1f of %.1f GB (%.0f %%) in %.0f s, %.2f GB/s",
            self.what, self.done / 1e9, self.total / 1e9, 100 * self.done / max(self.total, 1), seconds,
            self.done / 1e9 / seconds,
        )  # fmt: skip

    def __enter__(self) -> LoadProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._logged > self._start:
            self._log(time.monotonic())
