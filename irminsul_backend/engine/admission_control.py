"""Which requests the engine accepts: decided at once, on the thread that brings them."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from reprlib import repr as cut_repr

from irminsul_backend.errors import InvalidRequestError, OverloadedError, UnavailableError
from irminsul_backend.protocol import EngineState, GenerationRequest

LEAST_RETRY_S, MOST_RETRY_S = 1, 60
RECENT_STARTS = 64
"""Requests by whose pace the time until a place in the queue is free is estimated."""


class AdmissionControl:
    """Bounds the queue, keeps keys unique, and closes the door. Any thread may call any method."""

    def __init__(self, max_waiting: int, max_waiting_per_namespace: int) -> None:
        self._max_waiting, self._max_of_namespace = max_waiting, max_waiting_per_namespace
        self._changed = threading.Condition()
        self._keys: set[str] = set()  # accepted and not ended
        self._waiting: Counter[str] = Counter()  # accepted and not begun, by namespace
        self._num_waiting = 0
        self._starts: deque[float] = deque(maxlen=RECENT_STARTS)
        self._rejections: Counter[str] = Counter()
        self._state: EngineState = "running"
        self._reason = ""

    @property
    def state(self) -> EngineState:
        return self._state

    @property
    def reason(self) -> str:
        """Why the engine failed; empty otherwise."""
        return self._reason

    def accept(self, request: GenerationRequest, hand_over: Callable[[], None]) -> None:
        """Take a request in and call `hand_over`, before anything can happen to the request or to the engine.

        Raises:
            UnavailableError: the engine takes no requests any more.
            OverloadedError: too many are waiting.
            InvalidRequestError: the key is in use.
        """
        with self._changed:
            if self._state != "running":
                self._rejections["unavailable"] += 1
                raise self._unavailable()
            if request.key in self._keys:
                self._rejections["key_in_use"] += 1
                raise InvalidRequestError(
                    f"request key {cut_repr(request.key)} is in use by a running request; keys must be unique"
                )
            if self._num_waiting >= self._max_waiting:
                raise self._overloaded("queue_full", "the server", self._num_waiting, "max_waiting")
            if (waiting := self._waiting[request.namespace]) >= self._max_of_namespace:
                raise self._overloaded("namespace_full", "this cache_salt", waiting, "max_waiting_per_namespace")
            hand_over()
            self._keys.add(request.key)
            self._waiting[request.namespace] += 1
            self._num_waiting += 1

    def if_live(self, key: str, hand_over: Callable[[], None]) -> bool:
        """Call `hand_over` if a request of this key has been accepted and has not ended; returns whether it did."""
        with self._changed:
            if key in self._keys:
                hand_over()
                return True
        return False

    def if_open(self, hand_over: Callable[[], None]) -> None:
        """Call `hand_over` unless the engine's thread has ended or is about to; then raise UnavailableError."""
        with self._changed:
            if self._state in ("closed", "failed"):
                raise self._unavailable()
            hand_over()

    def started(self, request: GenerationRequest) -> None:
        """An accepted request waits no more: it runs, or has ended before."""
        with self._changed:
            self._num_waiting -= 1
            self._waiting[request.namespace] -= 1
            if not self._waiting[request.namespace]:
                del self._waiting[request.namespace]
            self._starts.append(time.monotonic())

    def ended(self, key: str) -> None:
        """A request has ended; its key is free."""
        with self._changed:
            self._keys.discard(key)
            if not self._keys:
                self._changed.notify_all()

    def shut(self, state: EngineState, reason: str = "") -> None:
        """Accept no further request; those accepted before stay. A state that is final already remains."""
        with self._changed:
            if self._state in ("running", "draining"):
                self._state, self._reason = state, reason
                self._changed.notify_all()

    def wait_until_empty(self, timeout_s: float) -> bool:
        """Wait until every accepted request has ended, or the engine has; False if time runs out first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: not self._keys or self._state in ("closed", "failed"), timeout=timeout_s
            )

    def rejections(self) -> dict[str, int]:
        """Return how many requests were turned away, by cause."""
        with self._changed:
            return {f"rejected_{cause}": count for cause, count in self._rejections.items()}

    def reject(self, cause: str) -> None:
        """Count a request that was turned away before :meth:`accept`."""
        with self._changed:
            self._rejections[cause] += 1

    def _unavailable(self) -> UnavailableError:
        if self._state == "failed":
            return UnavailableError(f"the engine has failed ({self._reason}); the server must be restarted")
        return UnavailableError("the server is shutting down; send the request to another one")

    def _overloaded(self, cause: str, who: str, waiting: int, setting: str) -> OverloadedError:
        self._rejections[cause] += 1
        seconds = self._time_to_work_off(waiting)
        return OverloadedError(
            f"{waiting} requests of {who} are waiting, as many as {setting} allows; retry after {seconds} s", seconds
        )

    def _time_to_work_off(self, waiting: int) -> int:
        """Seconds until so many requests have begun at the recent pace, within limits."""
        now = time.monotonic()
        recent = [start for start in self._starts if now - start < MOST_RETRY_S]
        if not recent:
            return LEAST_RETRY_S if not self._starts else MOST_RETRY_S
        per_second = len(recent) / max(1e-3, now - recent[0])
        return int(min(MOST_RETRY_S, max(LEAST_RETRY_S, waiting / per_second)))
