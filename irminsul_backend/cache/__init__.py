"""The KV cache addressed by content. Knows token ids, slots and positions; knows nothing of models, tensors or text."""

from irminsul_backend.cache.bound import GramBound
from irminsul_backend.cache.cache import Admission, PICache
from irminsul_backend.cache.cached_sequence import CachedSequence
from irminsul_backend.cache.interfaces import Index, Pool, ReusePolicy, Tier
from irminsul_backend.cache.planner import Segment, plan
from irminsul_backend.cache.policy import POLICIES
from irminsul_backend.cache.registry import Registry
from irminsul_backend.cache.slots import SlotPool

__all__ = [
    "POLICIES",
    "Admission",
    "CachedSequence",
    "GramBound",
    "Index",
    "PICache",
    "Pool",
    "Registry",
    "ReusePolicy",
    "Segment",
    "SlotPool",
    "Tier",
    "plan",
]
