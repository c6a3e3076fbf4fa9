"""The queue of waiting requests: by priority, then fair between namespaces and, within one, between sessions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

MOST_IDLE_FLOWS = 4096
"""Flows without a request whose debt is remembered, at most."""


class Queued(Protocol):
    """What the queue holds."""

    @property
    def arrival(self) -> float:
        """Time of arrival: the earlier ones of a session go first."""

    @property
    def priority(self) -> int: ...

    @property
    def flow(self) -> tuple[str, str]:
        """Namespace and session."""


Item = TypeVar("Item", bound=Queued)


class _Flow:
    """One namespace, or one session of a namespace."""

    __slots__ = ("members", "sessions", "tag", "waiting")

    def __init__(self) -> None:
        self.tag = 0.0  # virtual time at which its next request may start
        self.members = self.waiting = 0
        self.sessions = _Level()


class _Level:
    """Start-time fair queueing among flows: each token served moves its flow's tag on, and the virtual time by one part
    in the number of active flows. A flow that comes back starts no earlier than the virtual time: it gets no credit
    for its absence, and still bears what it was served in excess of its share. So a flow waits for a bounded number of
    tokens, however many others come."""

    __slots__ = ("_active", "_flows", "_now")

    def __init__(self) -> None:
        self._now = 0.0
        self._active = 0
        self._flows: dict[str, _Flow] = {}

    def __getitem__(self, name: str) -> _Flow:
        return self._flows[name]

    def join(self, name: str) -> _Flow:
        flow = self._flows.get(name) or self._flows.setdefault(name, _Flow())
        self._active += not flow.members
        flow.members += 1
        return flow

    def lift(self, flow: _Flow) -> None:
        """Move a flow's tag, when its first request begins to wait, to the virtual time at least."""
        flow.tag = max(flow.tag, self._now)

    def charge(self, flow: _Flow, tokens: int) -> None:
        flow.tag += tokens
        self._now += tokens / max(1, self._active)

    def leave(self, name: str) -> None:
        flow = self._flows[name]
        flow.members -= 1
        if flow.members:
            return
        self._active -= 1
        if flow.tag <= self._now:
            del self._flows[name]
        elif len(self._flows) - self._active > MOST_IDLE_FLOWS:
            self._flows = {n: f for n, f in self._flows.items() if f.members}


class FairQueue(Generic[Item]):
    """Requests that wait, and the tokens served to the flows of those that run.

    A request is a member from :meth:`join` to :meth:`leave`, and may wait several times in between.
    """

    def __init__(self) -> None:
        self._namespaces = _Level()
        self._waiting: dict[int, dict[str, dict[str, deque[Item]]]] = {}  # by priority, namespace and session
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def join(self, item: Item) -> None:
        namespace, session = item.flow
        self._namespaces.join(namespace).sessions.join(session)

    def leave(self, item: Item) -> None:
        """Forget a member that does not wait."""
        namespace, session = item.flow
        self._namespaces[namespace].sessions.leave(session)
        self._namespaces.leave(namespace)

    def push(self, item: Item, *, front: bool = False) -> None:
        """Let a member wait, after the others of its session or, where it has run already, before them."""
        namespace, session = item.flow
        outer = self._namespaces[namespace]
        inner = outer.sessions[session]
        if not outer.waiting:
            self._namespaces.lift(outer)
        if not inner.waiting:
            outer.sessions.lift(inner)
        sessions = self._waiting.setdefault(item.priority, {}).setdefault(namespace, {})
        line = sessions.setdefault(session, deque())
        if front:
            line.appendleft(item)
        else:
            line.append(item)
        self._count(item, 1)

    def remove(self, item: Item) -> None:
        """Take out a member that waits; it stays a member."""
        namespace, session = item.flow
        of_priority = self._waiting[item.priority]
        line = of_priority[namespace][session]
        line.remove(item)
        if not line:
            del of_priority[namespace][session]
            if not of_priority[namespace]:
                del of_priority[namespace]
                if not of_priority:
                    del self._waiting[item.priority]
        self._count(item, -1)

    def charge(self, item: Item, tokens: int) -> None:
        """Record that so many tokens were computed for a member."""
        namespace, session = item.flow
        flow = self._namespaces[namespace]
        self._namespaces.charge(flow, tokens)
        flow.sessions.charge(flow.sessions[session], tokens)

    def heads(self) -> Iterator[Item]:
        """Return the first waiting request of each session, in the order of their turns. Valid until the next call."""
        for priority in sorted(self._waiting, reverse=True):
            of_priority = self._waiting[priority]
            for namespace in self._in_turn(self._namespaces, {n: _first(s) for n, s in of_priority.items()}):
                lines = of_priority[namespace]
                first = {session: line[0].arrival for session, line in lines.items()}
                for session in self._in_turn(self._namespaces[namespace].sessions, first):
                    yield lines[session][0]

    @staticmethod
    def _in_turn(level: _Level, arrivals: dict[str, float]) -> Iterator[str]:
        """Return the flows with their first arrivals by tag, then by arrival; the first one without sorting all."""

        def turn(name: str) -> tuple[float, float]:
            return level[name].tag, arrivals[name]

        first = min(arrivals, key=turn)
        yield first
        yield from sorted(arrivals.keys() - {first}, key=turn)

    def _count(self, item: Item, change: int) -> None:
        namespace, session = item.flow
        flow = self._namespaces[namespace]
        flow.waiting += change
        flow.sessions[session].waiting += change
        self._size += change


def _first(sessions: dict[str, deque[Item]]) -> float:
    return min(line[0].arrival for line in sessions.values())
