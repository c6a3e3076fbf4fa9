"""Interfaces of the cache's parts: slot pool, content index, reuse policy and memory tier.

Each class documents the state it may modify. All methods are called from the engine's thread, so none takes a lock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from irminsul_backend.cache.cached_sequence import CachedSequence


class Place(NamedTuple):
    donor: CachedSequence
    offset: int
    """Position in the donor at which the chunk starts."""


class Pool(ABC):
    """Allocates slots and counts the references to them. Modifies its own arrays only, never a sequence or a row.

    Attributes:
        capacity: number of slots.
        num_free: number of slots without a reference.
        refs: int32 [capacity], reference count: how many entries of live sequences name the slot; 0 means free.
        base: int32 [capacity], base position at which the row was computed. Written by the cache at admission.
        generation: int16 [capacity], 0 for rows computed on purely exact context. Written by the cache at admission.
    """

    capacity: int
    num_free: int
    refs: np.ndarray
    base: np.ndarray
    generation: np.ndarray

    @abstractmethod
    def allocate(self, n: int) -> np.ndarray | None:
        """Allocate n slots with one reference each: int32 [n], or None, changing nothing, if fewer are free."""

    @abstractmethod
    def share(self, slots: np.ndarray) -> None:
        """Add one reference per entry of int32 `slots`. Entries may repeat; no slot may be free."""

    @abstractmethod
    def release(self, slots: np.ndarray) -> int:
        """Drop one reference per entry of int32 `slots`; returns how many slots became free."""

    @abstractmethod
    def check_free(self) -> None:
        """Raise AssertionError if the free slots are not those without a reference; looks at all of them."""


class Index(ABC):
    """Maps content to the donors that hold it. Of a sequence it modifies only the record of what is published.

    Lookups are proposals: the planner compares token ids before a row is reused, so a hash collision only costs time.
    """

    s1_window: int
    """Length in tokens of the windows that are indexed in addition to chunks; 0 = none."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of entries."""

    @abstractmethod
    def publish(self, sequence: CachedSequence) -> None:
        """Index the part of the sequence that is written and not indexed yet."""

    @abstractmethod
    def forget(self, sequence: CachedSequence) -> None:
        """Remove every entry that names the sequence; what others hold as well is then found in them."""

    @abstractmethod
    def content(self, namespace: str) -> Mapping[int, Place]:
        """Return the latest place of each known fingerprint; read-only, valid until publish or forget."""

    @abstractmethod
    def find_prefix(self, namespace: str, token_ids: np.ndarray) -> list[CachedSequence]:
        """Return the donors of the longest known prefix of int32 `token_ids` [n].

        They are that of the longest one whose rows are exact and, where an approximate one is longer, that of this one.
        """

    @abstractmethod
    def check(self, sequence: CachedSequence, start: int, end: int) -> None:
        """Raise AssertionError if an entry that the sequence has for positions in [start, end) is not found.

        Whichever way its entries are spread, those of ranges that together are the whole sequence are all of them.
        """

    @abstractmethod
    def entries(self) -> Iterator[tuple[str, CachedSequence, int]]:
        """Yield every entry as (namespace, donor, position that must be written), for integrity checks."""


class ReusePolicy(ABC):
    """Decides which cached rows a request may reuse; the rest of its prompt is computed. Stateless.

    The planner upholds the invariants whatever a policy decides: ids are compared, the last token is computed, and the
    first 32 positions are never reused by content.
    """

    name: str
    """Value of the request's input `reuse` that selects the policy: one of ``request_spec.REUSE_POLICIES``."""
    takes_prefix: bool
    """Whether a matching prefix may be reused, up to `prefix_length`; if False, the planner looks for none."""
    takes_content: bool
    """Whether content after the prefix may be reused from any position."""

    @abstractmethod
    def prefix_length(self, donor: CachedSequence) -> int:
        """Return how many of the donor's rows, from position 0 on, may be reused where the ids are equal."""


class Tier(ABC):
    """Takes over the rows of donors that the pool evicts. May read the donor; must not keep its slots."""

    @abstractmethod
    def store(self, donor: CachedSequence) -> None:
        """Store an idle donor that is being evicted; called once, before its slots are released."""
