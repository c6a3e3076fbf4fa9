"""The ways in which real agent harnesses disturb a prompt from one turn to the next, applied to recorded sessions.

A scenario is a chain of steps; each takes a turn's messages and returns new ones. One random generator, seeded once,
is shared by all turns of all sessions in order, so equal input gives equal output, and the first sessions of a trace
come out the same however many follow.
"""

from __future__ import annotations

import random
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from irminsul_traffic.traces import Message, TraceSession

SEED = 11
CLOCK_START = datetime(2026, 11, 29, 9)
CLOCK_STEP = timedelta(seconds=3.7)
FIXED_ROLES = ("system", "tool_schema", "doc")
PRUNED_ROLES = ("tool", "user")
KEPT_OUTPUTS = 4
SHORT_OUTPUT = 200
"""Characters; outputs up to this long are never pruned."""
REMINDER = (
    "<system-reminder>\nThe mode is now: build. Files may be changed and commands run. "
    "Keep the task list current and do not mention this reminder.\n</system-reminder>"
)


@dataclass
class TurnContext:
    """What a step may know in addition to the messages."""

    rng: random.Random
    session_id: str
    turn: int
    """Counted from 0 within the session."""
    clock: int
    """Turns before this one, in the whole trace."""
    longest: int
    """Characters in the session's longest turn."""


Step = Callable[[Sequence[Message], TurnContext], list[Message]]


def metadata_header(messages: Sequence[Message], context: TurnContext) -> list[Message]:
    """A line with a request id, a clock and a nonce in front of everything, new each turn."""
    request_id = uuid.UUID(int=context.rng.getrandbits(128))
    now = (CLOCK_START + context.clock * CLOCK_STEP).isoformat(timespec="milliseconds")
    nonce = context.rng.getrandbits(20)
    line = (
        f"x-agent-meta: request_id={request_id}; ts={now}Z; agent={context.session_id[:20]}; "
        f"turn={context.turn}; cch={nonce:05x}\n"
    )
    return [_with_content(messages[0], line + messages[0]["content"]), *messages[1:]]


def shuffled_units(messages: Sequence[Message], context: TurnContext) -> list[Message]:
    """Tool schemas in another order, documents too, and two old observations swapped."""
    result = list(messages)
    for role in ("tool_schema", "doc"):
        places = [i for i, m in enumerate(messages) if m["role"] == role]
        order = places.copy()
        context.rng.shuffle(order)
        for place, source in zip(places, order, strict=True):
            result[place] = messages[source]
    first = _first_user(result)
    swappable = [i for i in range(first + 1, len(result) - 1) if result[i]["role"] in PRUNED_ROLES]
    if len(swappable) >= 2:
        a, b = context.rng.sample(swappable, 2)
        result[a], result[b] = result[b], result[a]
    return result


def newest_within_budget(messages: Sequence[Message], context: TurnContext) -> list[Message]:
    """The fixed head and the first user message, then only the newest messages within half of the longest turn."""
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    head = [m for i, m in enumerate(messages) if m["role"] in FIXED_ROLES or i == first]
    rest = [m for i, m in enumerate(messages) if m["role"] not in FIXED_ROLES and i != first]
    room = context.longest / 2 - _characters(head)
    keep = 0
    for message in reversed(rest):
        room -= len(message["content"])
        if room < 0 and keep > 0:
            break
        keep += 1
    dropped = len(rest) - keep
    if dropped:
        head.append({"role": "user", "content": f"[{dropped} earlier messages omitted to fit the context]"})
    return head + rest[dropped:]


def pruned_outputs(messages: Sequence[Message], context: TurnContext) -> list[Message]:
    """Each long output but the newest ones becomes a stub of one line."""
    first = _first_user(messages)
    long = [
        i
        for i, m in enumerate(messages)
        if i > first and m["role"] in PRUNED_ROLES and len(m["content"]) > SHORT_OUTPUT
    ]
    result = list(messages)
    for i in long[:-KEPT_OUTPUTS]:
        result[i] = _with_content(messages[i], f"[Tool output pruned - was {len(messages[i]['content'])} chars]")
    return result


def riding_reminder(messages: Sequence[Message], context: TurnContext) -> list[Message]:
    """A reminder at the end of the newest user or tool message, gone from it in the next turn."""
    result = list(messages)
    for i in reversed(range(len(result))):
        if result[i]["role"] in PRUNED_ROLES:
            result[i] = _with_content(result[i], f"{result[i]['content']}\n{REMINDER}")
            break
    return result


SCENARIOS: dict[str, tuple[Step, ...]] = {
    "asis": (),
    "early": (metadata_header,),
    "reorder": (shuffled_units,),
    "trim": (newest_within_budget,),
    "prune": (pruned_outputs,),
    "reminder": (riding_reminder,),
    "all": (newest_within_budget, shuffled_units, metadata_header),
}


def apply_scenario(name: str, sessions: Iterable[TraceSession], seed: int = SEED) -> Iterator[TraceSession]:
    """Yield the sessions as the scenario leaves them. Raises KeyError for a name that is not in SCENARIOS."""
    steps = SCENARIOS[name]
    return _apply(steps, sessions, random.Random(seed))


def _apply(steps: Sequence[Step], sessions: Iterable[TraceSession], rng: random.Random) -> Iterator[TraceSession]:
    clock = 0
    for session in sessions:
        longest = max(_characters(turn) for turn in session.turns)
        turns: list[tuple[Message, ...]] = []
        for number, turn in enumerate(session.turns):
            context = TurnContext(rng, session.session_id, number, clock, longest)
            messages = list(turn)
            for step in steps:
                messages = step(messages, context)
            turns.append(tuple(messages))
            clock += 1
        yield replace(session, turns=tuple(turns))


def _first_user(messages: Sequence[Message]) -> int:
    return next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)


def _characters(messages: Iterable[Message]) -> int:
    return sum(len(m["content"]) for m in messages)


def _with_content(message: Message, content: str) -> Message:
    return {**message, "content": content}
