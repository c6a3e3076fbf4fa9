"""What the cache is made of: a pool of slots, an index of content, a reuse policy and a tier of memory.

Each class says what it may touch. All of them are called from the engine's thread, under no lock.
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
    """Hands out slots and counts their holders. Touches its own arrays only, never a sequence or a row.

    Attributes:
        capacity: number of slots.
        num_free: slots without a holder.
        refs: int32 [capacity], how many places in live sequences name the slot; 0 is free.
        base: int32 [capacity], base position, where the row was computed. Written by the cache at admission.
        generation: int16 [capacity], 0 for rows computed on purely exact context. Written by the cache at admission.
    """

    capacity: int
    num_free: int
    refs: np.ndarray
    base: np.ndarray
    generation: np.ndarray

    @abstractmethod
    def allocate(self, n: int) -> np.ndarray | None:
        """Take n free slots, each with one reference: int32 [n], or None, with nothing changed, if fewer are free."""

    @abstractmethod
    def share(self, slots: np.ndarray) -> None:
        """Add a reference for every entry of int32 `slots`, which may repeat; none of them may be free."""

    @abstractmethod
    def release(self, slots: np.ndarray) -> int:
        """Drop a reference for every entry of int32 `slots`; returns how many slots became free."""


class Index(ABC):
    """Proposes donors by content. Reads sequences, writes only the bookkeeping of what it published of them.

    It may be wrong: the planner compares token ids before a row is reused, so a collision costs time.
    """

    s1_window: int
    """Length of the windows that are indexed besides chunks; 0 = none."""

    @abstractmethod
    def __len__(self) -> int:
        """Number of entries."""

    @abstractmethod
    def publish(self, sequence: CachedSequence) -> None:
        """Index what is written of the sequence and not indexed yet."""

    @abstractmethod
    def forget(self, sequence: CachedSequence) -> None:
        """Remove every entry that names the sequence."""

    @abstractmethod
    def content(self, namespace: str) -> Mapping[int, Place]:
        """Where each known fingerprint of the namespace lies. Valid until the next publish or forget; do not write."""

    @abstractmethod
    def find_prefix(self, namespace: str, token_ids: np.ndarray) -> CachedSequence | None:
        """The donor of the longest known prefix of int32 `token_ids` [n]."""

    @abstractmethod
    def entries(self) -> Iterator[tuple[str, CachedSequence, int]]:
        """Every entry as (namespace, donor, position that must be written), for integrity checks."""


class ReusePolicy(ABC):
    """Says which finds a request may take; everything else of its prompt is computed. Touches nothing.

    The planner asks it, and keeps to the invariants whatever it answers: ids are compared, the last token is computed,
    and the first 32 positions are never reused by content.
    """

    name: str
    """As requests name it: one of ``request_spec.REUSE_POLICIES``."""
    takes_prefix: bool
    """Whether a prefix may be taken, as far as `prefix_length` says; if not, none is looked for."""
    takes_content: bool
    """Whether chunks found at any place may be taken, after the prefix."""

    @abstractmethod
    def prefix_length(self, donor: CachedSequence) -> int:
        """How many of the donor's rows, from position 0 on, may be taken where the ids are equal."""


class Tier(ABC):
    """Where the rows of donors go that the pool has no room for. May read the donor; must not keep its slots."""

    @abstractmethod
    def store(self, donor: CachedSequence) -> None:
        """Called once for an idle donor, before its slots are released."""
