"""Which requests of a log without session keys belong together: those that repeat a former one's messages."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from irminsul_traffic.scenarios import FIXED_ROLES
from irminsul_traffic.traces import Message

from irminsul_backend.analysis.causes import common_beginning

REMEMBERED = 64
"""Sessions that a request is compared with, the latest ones."""
SIMILAR = 0.5
"""Least share of the shorter prompt that two prompts of a session have in common."""

SIMILAR_END = 0.8
"""Least such share for texts that end alike: a reminder after different messages may be longer than they are."""


class SessionGuesser:
    """Names the session of each request in turn. A guess decides which prompts are compared, never what is reused."""

    def __init__(self, prefix: str) -> None:
        """prefix: of the sessions' names, such as the user."""
        self._prefix = prefix
        self._latest: OrderedDict[str, tuple[Message, ...]] = OrderedDict()  # least recent first
        self._count = 0

    def session_of(self, turn: tuple[Message, ...]) -> str:
        """The session whose last prompt is most like `turn`, or a new one."""
        best, name = 0.0, ""
        for candidate, former in reversed(self._latest.items()):
            score = similarity(former, turn)
            if score > best:
                best, name = score, candidate
                if best == 1.0:
                    break
        if best < SIMILAR:
            self._count += 1
            name = f"{self._prefix}guessed-{self._count}"
        self._latest[name] = turn
        self._latest.move_to_end(name)
        if len(self._latest) > REMEMBERED:
            self._latest.popitem(last=False)
        return name


def similarity(a: Sequence[Message], b: Sequence[Message]) -> float:
    """Share (0 to 1) of the shorter conversation's messages that the other one has, too.

    A message counts as equal to the one at its place in the other conversation if they begin or end alike. System text,
    tools and documents say nothing: all sessions of a product share them.
    """
    a = [m for m in a if m["role"] not in FIXED_ROLES]
    b = [m for m in b if m["role"] not in FIXED_ROLES]
    if not a or not b:
        return 0.0
    known = {(m["role"], m["content"]) for m in a}
    shared: int = sum((m["role"], m["content"]) in known for m in b)
    shared += sum(
        x["role"] == y["role"] and x["content"] != y["content"] and _begin_or_end_alike(x["content"], y["content"])
        for x, y in zip(a, b, strict=False)
    )
    return min(1.0, shared / min(len(a), len(b)))


def _begin_or_end_alike(a: str, b: str) -> bool:
    shorter = min(len(a), len(b))
    if not shorter:
        return False
    begin, end = common_beginning(a, b), common_beginning(a[::-1], b[::-1])
    return begin >= SIMILAR * shorter or end >= SIMILAR_END * shorter
