"""What goes wrong inside the engine: counted, logged at a bounded rate, and judged whether the engine can go on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

MAX_CONSECUTIVE_FAULTS = 3
"""Faulty steps in a row, without one that computed something for a request, after which the engine gives up."""
LOG_EVERY_S = 10.0
"""Seconds between two log entries about the same kind of fault, at least."""
MOST_CHARACTERS = 300
"""Of an exception's message, in logs and events."""


def describe(error: BaseException) -> str:
    """Return an exception's type and message, cut to a sensible length."""
    text = f"{type(error).__name__}: {error}"
    return text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS] + "…"


class Faults:
    """Counts faults, and decides when they are the engine's end."""

    def __init__(self, check_device: Callable[[], None]) -> None:
        """check_device: raises if the device does not work any more."""
        self._check_device = check_device
        self._consecutive = 0
        self._logged: dict[tuple[str, type], tuple[float, int]] = {}
        self.count = 0
        self.fatal = ""
        """Why the engine cannot go on; empty as long as it can."""

    def record(self, what: str, error: BaseException) -> str:
        """Count and log a fault; returns its description. `what` is what was being done, one of a few texts."""
        self.count += 1
        description = describe(error)
        if not self.fatal and is_device_error(error):
            try:
                self._check_device()
            except Exception as again:
                self.fatal = f"the device does not work any more: {describe(again)}"
        self.log(what, error)
        return description

    def log(self, what: str, error: BaseException) -> None:
        """Log an exception with its traceback, unless one of the same kind was logged a moment ago."""
        kind, now = (what, type(error)), time.monotonic()
        last, suppressed = self._logged.get(kind, (-LOG_EVERY_S, 0))
        if now - last < LOG_EVERY_S:
            self._logged[kind] = last, suppressed + 1
            return
        self._logged[kind] = now, 0
        more = f" ({suppressed} more since the last entry of this kind)" if suppressed else ""
        log.error("%s failed%s: %s", what, more, describe(error), exc_info=error if len(str(error)) < 10_000 else None)

    def step_ended(self, progress: bool, faulty: bool) -> None:
        """Take in the outcome of a step: whether it computed something for a request, and whether a fault occurred."""
        if progress:
            self._consecutive = 0
        elif faulty:
            self._consecutive += 1
            if self._consecutive >= MAX_CONSECUTIVE_FAULTS and not self.fatal:
                self.fatal = f"{self._consecutive} steps in a row failed"


def is_device_error(error: BaseException) -> bool:
    """Whether an exception may mean that the device is lost: CUDA reports the same error again from then on."""
    accelerator_error = getattr(torch, "AcceleratorError", None)
    if accelerator_error is not None and isinstance(error, accelerator_error):
        return True
    return isinstance(error, RuntimeError) and "CUDA error" in str(error)
