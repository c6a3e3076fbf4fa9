"""What the border calls on the engine: the whole of it, so that a test can put something smaller in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from irminsul_backend.protocol import Event, FinishReason, GenerationRequest


class CacheInterface(Protocol):
    """The engine's KV cache, as far as the metrics look at it."""

    def stats(self) -> Mapping[str, Any]:
        """Counts by name, among them the pool's slots: `used` and `capacity`."""


class EngineInterface(Protocol):
    """A running engine; :class:`irminsul_backend.engine.Engine` is one. Each method may be called from any thread."""

    @property
    def cache(self) -> CacheInterface: ...

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

    def close(self) -> None:
        """End every request with an error, and the engine."""


class MetricsInterface(Protocol):
    """Where ended requests are counted."""

    def count(self, event: Event) -> None:
        """Count the request that this `finished` or `error` event ended."""

    def close(self) -> None:
        """Give the metrics back, before the stub ends."""
