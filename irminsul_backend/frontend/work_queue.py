"""Runs the work of many clients on a few threads, so that one client's megabytes do not delay another's short text."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from typing import Generic, NamedTuple, TypeVar

from irminsul_backend.errors import OverloadedError, UnavailableError

LARGE_BYTES = 1 << 16
"""Items from this size on are large: only some of the threads may work on them at once."""
BYTES_PER_SECOND = 4 << 20
"""About what one thread tokenises. An item that waits grows older at this rate: a large one is overtaken by smaller
ones, but not for ever."""
SMALL_THREADS = 2
"""Threads that no large item can take."""
MAX_ITEMS = 4096

T = TypeVar("T")
logger = logging.getLogger(__name__)


class _Entry(NamedTuple, Generic[T]):
    rank: float
    """Lowest first: arrival in bytes at BYTES_PER_SECOND, plus size."""
    number: int
    size: int
    lane: Hashable | None
    item: T


class WorkQueue(Generic[T]):
    """Calls `work(item)` on threads of its own: small items first, items of one lane one after the other in order.

    What waits is bounded, in number and in bytes. `submit` and `close` may be called from any thread.
    """

    def __init__(self, work: Callable[[T], None], max_bytes: int, large_at_once: int | None = None) -> None:
        """Start the threads.

        Args:
            work: must not raise; what it raises is logged.
            max_bytes: bound on the sizes of all items that wait or are worked on.
            large_at_once: large items that are worked on at once; by default one for every four cores.
        """
        self._work, self._max_bytes = work, max_bytes
        self._large_at_once = large_at_once or max(1, (os.cpu_count() or 1) // 4)
        self._ready = threading.Condition()
        self._small: list[_Entry[T]] = []
        self._large: list[_Entry[T]] = []
        self._lanes: dict[Hashable, deque[_Entry[T]]] = {}
        """What waits behind the one item of each lane that is ready or worked on."""
        self._numbers = itertools.count()
        self._large_running = self._bytes = self._items = 0
        self._closing = False
        self._threads = [
            threading.Thread(target=self._run, name=f"irminsul-prepare-{n}", daemon=True)
            for n in range(self._large_at_once + SMALL_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, item: T, size: int, lane: Hashable | None = None) -> None:
        """Queue an item of `size` bytes and return at once; without a lane it waits for no other item.

        Raises:
            OverloadedError: too much waits already; the message has both figures.
            UnavailableError: the queue is closed.
        """
        with self._ready:
            if self._closing:
                raise UnavailableError("the server is shutting down; send the request to another one")
            # An item that is alone always fits: how large one may be is limited elsewhere.
            if self._items >= MAX_ITEMS or (self._items and self._bytes + size > self._max_bytes):
                seconds = 1 + self._bytes // BYTES_PER_SECOND
                raise OverloadedError(
                    f"{self._items} prompts of {self._bytes} bytes wait to be tokenised; at most {MAX_ITEMS} and "
                    f"{self._max_bytes} bytes may; send the request again in {seconds} s",
                    retry_after_s=seconds,
                )
            self._bytes, self._items = self._bytes + size, self._items + 1
            rank = time.monotonic() * BYTES_PER_SECOND + size
            entry = _Entry(rank, next(self._numbers), size, lane, item)
            if lane is not None and lane in self._lanes:
                self._lanes[lane].append(entry)
                return
            if lane is not None:
                self._lanes[lane] = deque()
            self._make_ready(entry)

    def close(self) -> list[T]:
        """End the threads after what they are working on, or 2 seconds; return the items that nobody will work on."""
        with self._ready:
            self._closing = True
            waiting = [*self._small, *self._large, *itertools.chain.from_iterable(self._lanes.values())]
            self._small, self._large, self._lanes = [], [], {}
            self._ready.notify_all()
        deadline = time.monotonic() + 2
        for thread in self._threads:
            thread.join(timeout=max(0.0, deadline - time.monotonic()))
        return [entry.item for entry in sorted(waiting, key=lambda entry: entry.number)]

    def _make_ready(self, entry: _Entry[T]) -> None:
        heapq.heappush(self._small if entry.size < LARGE_BYTES else self._large, entry)
        # Not every waiting thread may take it, and a notified one that may not would keep the news to itself.
        self._ready.notify_all()

    def _take(self) -> _Entry[T] | None:
        """Return the next item that this thread may work on, or None."""
        large = self._large if self._large_running < self._large_at_once else []
        heaps = [heap for heap in (self._small, large) if heap]
        return heapq.heappop(min(heaps)) if heaps else None

    def _run(self) -> None:
        while True:
            with self._ready:
                while (entry := self._take()) is None:
                    if self._closing:
                        return
                    self._ready.wait()
                self._large_running += entry.size >= LARGE_BYTES
            try:
                self._work(entry.item)
            except Exception:
                logger.exception("an item was not worked on")
            with self._ready:
                self._done(entry)
            del entry  # a thread that waits keeps nothing of its last request

    def _done(self, entry: _Entry[T]) -> None:
        self._bytes, self._items = self._bytes - entry.size, self._items - 1
        if entry.size >= LARGE_BYTES:
            self._large_running -= 1
            if self._large:
                self._ready.notify_all()
        followers = self._lanes.get(entry.lane)
        if followers:
            self._make_ready(followers.popleft())
        elif followers is not None:
            del self._lanes[entry.lane]
