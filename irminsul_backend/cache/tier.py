"""Tiers of memory below the pool. There is none yet: rows that the pool has no room for are computed again."""

from __future__ import annotations

from irminsul_backend.cache.cached_sequence import CachedSequence
from irminsul_backend.cache.interfaces import Tier


class NoTier(Tier):
    """Keeps nothing."""

    def store(self, donor: CachedSequence) -> None:
        return
