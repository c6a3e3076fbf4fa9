"""A thread-safe LRU cache of tokenised text, bounded in bytes."""

from __future__ import annotations

import sys
from collections import OrderedDict
from threading import Lock

import numpy as np
from numpy.typing import NDArray

_ENTRY_BYTES = 300
"""Overhead of one entry: dictionary entry, linked list node and array header."""


class SegmentMemo:
    """LRU cache from a piece of text to its token ids. All methods may be called from any thread.

    The arrays are shared, not copied: treat them as read-only.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._ids: OrderedDict[str, NDArray[np.int32]] = OrderedDict()
        self._lock = Lock()
        self.size_bytes = 0
        """Bytes in use, at most `max_bytes`."""

    def get(self, text: str) -> NDArray[np.int32] | None:
        """Return the ids of `text`, int32 [n], or None if it is not cached."""
        with self._lock:
            ids = self._ids.get(text)
            if ids is not None:
                self._ids.move_to_end(text)
            return ids

    def put(self, text: str, ids: NDArray[np.int32]) -> None:
        """Cache the ids of `text`, evicting the least recently used entries to stay within the bound."""
        with self._lock:
            if text in self._ids or self._cost(text, ids) > self._max_bytes:
                return
            self._ids[text] = ids
            self.size_bytes += self._cost(text, ids)
            while self.size_bytes > self._max_bytes:
                self.size_bytes -= self._cost(*self._ids.popitem(last=False))

    @staticmethod
    def _cost(text: str, ids: NDArray[np.int32]) -> int:
        return sys.getsizeof(text) + ids.nbytes + _ENTRY_BYTES
