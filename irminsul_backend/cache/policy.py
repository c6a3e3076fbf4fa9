"""The reuse policies.

To add one, write its class here, add it to `POLICIES`, add its name to the choices of `reuse` in `request_spec`, and
run `make generate`.
"""

from __future__ import annotations

from irminsul_backend.cache.cached_sequence import CachedSequence
from irminsul_backend.cache.interfaces import ReusePolicy


class Off(ReusePolicy):
    """Reuses nothing; the whole prompt is computed."""

    name = "off"
    takes_prefix = False
    takes_content = False

    def prefix_length(self, donor: CachedSequence) -> int:
        return 0


class Exact(ReusePolicy):
    """Reuses the longest prefix whose rows equal those of a full prefill."""

    name = "exact"
    takes_prefix = True
    takes_content = False

    def prefix_length(self, donor: CachedSequence) -> int:
        return donor.exact_length


class Content(ReusePolicy):
    """Reuses the longest prefix, exact or not, then content found at any position."""

    name = "content"
    takes_prefix = True
    takes_content = True

    def prefix_length(self, donor: CachedSequence) -> int:
        return donor.length


POLICIES: dict[str, ReusePolicy] = {policy.name: policy for policy in (Off(), Exact(), Content())}
