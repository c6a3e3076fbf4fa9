"""Why a prompt left its predecessor: the first difference between two prompts of a session, and what made it.

Works on messages, so it says what a harness did ("an old result was pruned"), not only which token differs.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from irminsul_traffic.traces import Message

Part = tuple[str, str]
"""(role, text)"""

CAUSES: dict[str, str] = {
    "header": "Move clocks, request ids and counters after the history, or out of the prompt: one changed token near "
    "the start costs everything after it.",
    "tool_order": "Send the tools in one fixed order, sorted by name, in every request.",
    "tool_set": "Keep the tool list constant in a session (say in the last message which ones are off), or put those "
    "that come and go at its end.",
    "document_order": "Append new documents and results after the old ones; do not sort them anew every turn.",
    "document_set": "Keep retrieved documents where they were first sent and add new ones after them.",
    "pruned_output": "Prune old outputs rarely and many at once, or shorten them before they are first sent.",
    "trimmed_history": "Trim in large steps (down to half, not message by message), so that most turns only append.",
    "moved_reminder": "Leave a reminder in the message where it was first sent, or send it as the last message only.",
    "rewritten_message": "Treat sent messages as immutable: append a correction instead of editing or inserting.",
    "new_text": "Nothing to do: the prompt only grew; what is reused here repeats text from elsewhere.",
}
"""Advice by name of a cause."""

SYSTEM_ROLES = ("system", "developer")
OUTPUT_ROLES = ("tool", "function")
HEADER_CHANGE = 512
"""Characters; a longer change in the first message is a rewrite, not a header."""
HEADER_CONTEXT = 32
"""Characters after the change that must be equal, unless only clocks and nonces changed."""
_VOLATILE = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"
    r"|\b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b"
    r"|\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sep(?:tember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?|am|pm)\b"
    r"|\b[0-9a-z]*[0-9][0-9a-z]*\b|\b[0-9a-f]{4,}\b",
    re.IGNORECASE,
)
"""What clocks and nonces are made of: uuids, names of days and months, hex, words with a digit."""


def parts_of(messages: Sequence[Message]) -> list[Part]:
    return [(m["role"], m["content"]) for m in messages]


def common_parts(a: Sequence[Part], b: Sequence[Part]) -> int:
    """Leading messages that are equal."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count


def likeness(former: Sequence[Part], current: Sequence[Part]) -> tuple[int, int]:
    """Larger for a former prompt that is more like the current one: first by common beginning, then by messages."""
    return common_parts(former, current), len(set(former).intersection(current))


def classify(former: Sequence[Part], current: Sequence[Part]) -> str:
    """The name in `CAUSES` of what made `current` leave `former`, two prompts of one session."""
    at = common_parts(former, current)
    if at == len(former):
        return "new_text"
    if at == len(current):
        return "trimmed_history"
    was, now = former[at], current[at]
    kind = _by_fixed_role(former, current, was, now)
    if kind is not None:
        return kind
    if at == len(former) - 1 and was[0] == now[0] and now[1].startswith(was[1]):
        return "new_text"
    if _reminder_left(former, current, at):
        return "moved_reminder"
    if _is_header(former, current, at):
        return "header"
    if was[0] in SYSTEM_ROLES:
        return "moved_reminder" if _system_moved(former, current, at) else "rewritten_message"
    known, staying = set(former[at:]), set(current[at:])
    if was in staying:
        if now in known:
            return "document_order"
        # The former newest message now stands after new ones; anything else was put in between.
        return "moved_reminder" if at == len(former) - 1 and _is_aside(was, current) else "rewritten_message"
    if _was_trimmed(former, current, at, known, staying):
        return "trimmed_history"
    if was[0] == now[0] and len(now[1]) < len(was[1]) and _is_output(current, at):
        return "pruned_output"
    if _same_but_volatile(was[1], now[1]) and was[0] == now[0]:
        return "header"
    return "rewritten_message"


def _by_fixed_role(former: Sequence[Part], current: Sequence[Part], was: Part, now: Part) -> str | None:
    """Tools and documents: another order if both prompts hold the same ones, else another set."""
    for role, order, change in (
        ("tool_schema", "tool_order", "tool_set"),
        ("doc", "document_order", "document_set"),
    ):
        if role in (was[0], now[0]):
            same = Counter(p for p in former if p[0] == role) == Counter(p for p in current if p[0] == role)
            return order if same else change
    return None


def _is_header(former: Sequence[Part], current: Sequence[Part], at: int) -> bool:
    """A small change inside a message at the head, of values that change by themselves or between equal texts."""
    head = next((i for i, (role, _) in enumerate(current) if role == "user"), 0)
    (role, was), (new_role, now) = former[at], current[at]
    if at > head or role != new_role:
        return False
    begin = common_beginning(was, now)
    end = common_beginning(was[begin:][::-1], now[begin:][::-1])
    shorter = min(len(was), len(now))
    if max(len(was), len(now)) - begin - end > HEADER_CHANGE:
        return False
    return (end >= HEADER_CONTEXT and begin + end >= shorter / 2) or _same_but_volatile(was, now)


def _same_but_volatile(was: str, now: str) -> bool:
    return _VOLATILE.sub("#", was) == _VOLATILE.sub("#", now)


def _is_aside(part: Part, current: Sequence[Part]) -> bool:
    """Whether a message was sent again as one of the newest: with at most one after it."""
    return part in current[-2:]


def _system_moved(former: Sequence[Part], current: Sequence[Part], at: int) -> bool:
    """Whether a system message near the end now stands near the new end, after what followed it, clocks apart."""
    role, was = former[at]
    if not _is_newest(former, at):
        return False
    for place in range(at + 1, len(current)):
        new_role, now = current[place]
        if role == new_role and _is_newest(current, place) and _same_but_volatile(was, now):
            return at + 1 == len(former) or former[at + 1] in current[at:place]
    return False


def _is_newest(parts: Sequence[Part], place: int) -> bool:
    """Whether a message is one of the last two, or stands just before the last user message."""
    users = [i for i, (role, _) in enumerate(parts) if role == "user"]
    return place >= len(parts) - 2 or (bool(users) and place == users[-1] - 1)


def _is_output(current: Sequence[Part], at: int) -> bool:
    """Whether a message can be what a tool said: by its role, or a user's answer to the assistant, not the newest.

    The newest message of a user is a question; in prompts made from a template it is what differs.
    """
    if current[at][0] in OUTPUT_ROLES:
        return True
    return current[at][0] == "user" and 0 < at < len(current) - 1 and current[at - 1][0] == "assistant"


def _reminder_left(former: Sequence[Part], current: Sequence[Part], at: int) -> bool:
    """Whether text at the end (or the beginning) of a message is gone from it and stands in a later one."""
    (role, was), (new_role, now) = former[at], current[at]
    if role != new_role or len(now) >= len(was):
        return False
    if was.startswith(now):
        rest = was[len(now) :].strip()
    elif was.endswith(now):
        rest = was[: len(was) - len(now)].strip()
    else:
        return False
    if not rest:
        return False
    later = [text for _, text in current[at + 1 :]]
    if any(rest in text for text in later):
        return True
    pattern = _VOLATILE.sub("#", rest)
    return any(pattern in _VOLATILE.sub("#", text) for text in later[-2:])


def _was_trimmed(
    former: Sequence[Part], current: Sequence[Part], at: int, known: set[Part], staying: set[Part]
) -> bool:
    """Whether messages are missing: more of `former` was skipped than new ones stand in their place."""
    inserted = 0
    while at + inserted < len(current) and current[at + inserted] not in known:
        inserted += 1
    if at + inserted == len(current):
        # Nothing that stood after the break is left.
        return len(former) - at > 1 and not any(part in staying for part in former[at:])
    resumed = former.index(current[at + inserted], at)
    gone = sum(part not in staying for part in former[at:resumed])
    if inserted == 1 and gone == 1:
        return former[at][0] != current[at][0]
    return gone > 0 and (inserted <= 1 or gone > inserted)


def common_beginning(a: str, b: str) -> int:
    """Characters that are equal from the start."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[:middle] == b[:middle]:
            low = middle
        else:
            high = middle - 1
    return low
