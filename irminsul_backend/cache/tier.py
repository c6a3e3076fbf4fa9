"""Memory tiers below the pool. There is none yet: evicted rows are computed again when they are needed."""

from __future__ import annotations

from irminsul_backend.cache.cached_sequence import CachedSequence
from irminsul_backend.cache.interfaces import Tier


class NoTier(Tier):
    """Drops evicted donors."""

    def store(self, donor: CachedSequence) -> None:
        return
