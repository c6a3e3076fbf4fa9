"""What the border calls on the engine: the whole of it, so that a test can put something smaller in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from irminsul_backend.protocol import EngineSnapshot, Event, FinishReason, GenerationRequest


class EngineInterface(Protocol):
    """A running engine; :class:`irminsul_backend.engine.Engine` is one. Each method may be called from any thread."""

    def submit(
        self,
        request: GenerationRequest,
        token_ids: npt.NDArray[np.int32],
        chunk_ends: npt.NDArray[np.int32],
        fingerprints: npt.NDArray[np.uint64],
        on_event: Callable[[Event], None],
    ) -> None:
        """Queue a request and return at once; raises InvalidRequestError if it cannot be run.

        Args:
            token_ids: int32 [n].
            chunk_ends: int32 [chunks].
            fingerprints: uint64 [chunks].
            on_event: called with every Event in order; the last one is of kind `finished` or `error`.
        """

    def stop(self, key: str, reason: FinishReason = "cancelled") -> bool:
        """End the request `key` early; False if there is none."""

    def status(self) -> dict[str, Any]:
        """Statistics as JSON values. Waits for the step that is running; raises TimeoutError if that takes too long."""

    def snapshot(self) -> EngineSnapshot:
        """The engine's state after its last step, as numbers that never change. Waits for nothing."""

    def close(self) -> None:
        """End every request with an error, and the engine."""


class RejectionMetrics(Protocol):
    """Where requests are counted that are refused before the engine."""

    def count(self, error: Exception) -> None:
        """Count a refused request. Returns at once."""

    def close(self) -> None:
        """Give the metrics back, before the stub ends."""


class MetricsInterface(Protocol):
    """Where tokens are timed and ended requests counted."""

    def count(self, event: Event) -> None:
        """Take note of an event that is about to be sent. Returns at once."""

    def close(self) -> None:
        """Give the metrics back, before the stub ends."""
