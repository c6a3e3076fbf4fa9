"""A sequence whose rows are (or are becoming) available to others: a donor."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from irminsul_backend.chunking import chunk_starts

MAX_GENERATION = np.iinfo(np.int16).max
"""Generations saturate here."""


@dataclass(eq=False)
class CachedSequence:
    """Token ids and slots of one request, running or finished. Position i is `token_ids[i]`, its row in `slots[i]`.

    A sequence owns its ids from admission to eviction; only the cache writes its fields. While it runs, the arrays have
    room for every token that may come, of which the first have slots; rows `[0, length)` are written, and only those
    may be reused by others.
    """

    namespace: str
    session_id: str
    token_ids: np.ndarray
    """int32 [room]"""
    slots: np.ndarray
    """int32 [size], size <= room; two sequences, or two places in one, may name the same slot."""
    generation: np.ndarray
    """int16 [room]: 0 where every row attended to was exact in this sequence; a row reused by content counts as its own
    generation + 1, and a row computed after it inherits the highest value so far."""
    chunk_ends: np.ndarray
    """int32 [chunks]"""
    fingerprints: np.ndarray
    """uint64 [chunks]"""
    prompt_length: int = field(init=False)
    gram: int = 0
    """Number of ids that a fingerprint covers, up to its chunk's end; 0 = the whole chunk (``Preset.gram``)."""
    length: int = 0
    alive: bool = True
    """Whether the cache holds it, running or idle."""
    running: bool = True
    leaves_donor: bool = True
    """False once its namespace is forgotten: its rows are not indexed, and end with it."""
    num_published: int = 0
    """Number of chunks that the index holds of this sequence."""
    content_keys: list[int] = field(default_factory=list)
    prefix_keys: list[int] = field(default_factory=list)

    room: np.ndarray = field(init=False)
    """int32 [room], the array whose beginning `slots` is. Pages that are never touched take no memory."""
    first_inexact: int = field(init=False)
    """First position whose generation is not 0, or the room."""

    def __post_init__(self) -> None:
        self.room = self.slots
        self.prompt_length = int(self.chunk_ends[-1]) if len(self.chunk_ends) else 0
        inexact = self.generation > 0
        self.first_inexact = int(inexact.argmax()) if inexact.any() else len(inexact)

    @property
    def chunk_starts(self) -> np.ndarray:
        """int64 [chunks], the first position that each fingerprint covers."""
        return chunk_starts(self.chunk_ends, self.gram)

    @property
    def exact_length(self) -> int:
        """Length of the written prefix whose rows equal those of a full prefill (generation 0)."""
        return min(self.length, self.first_inexact)
