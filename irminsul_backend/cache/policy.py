"""The reuse policies. A new one is a class here, in `POLICIES`, and its name among the choices in `request_spec`."""

from __future__ import annotations

from irminsul_backend.cache.cached_sequence import CachedSequence
from irminsul_backend.cache.interfaces import ReusePolicy


class Off(ReusePolicy):
    """Compute everything."""

    name = "off"
    takes_prefix = False
    takes_content = False

    def prefix_length(self, donor: CachedSequence) -> int:
        return 0


class Exact(ReusePolicy):
    """The longest prefix whose rows equal those of a full prefill."""

    name = "exact"
    takes_prefix = True
    takes_content = False

    def prefix_length(self, donor: CachedSequence) -> int:
        return donor.exact_length


class Content(ReusePolicy):
    """The longest prefix, exact or not, then chunks found anywhere."""

    name = "content"
    takes_prefix = True
    takes_content = True

    def prefix_length(self, donor: CachedSequence) -> int:
        return donor.length


POLICIES: dict[str, ReusePolicy] = {policy.name: policy for policy in (Off(), Exact(), Content())}
