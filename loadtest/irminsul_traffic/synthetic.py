"""Made-up agent sessions for machines without a recorded trace: seeded, of the same form as recorded ones.

Each session has a system prompt, tool schemas, documents, and a history that grows by an assistant message and a tool
result a turn. Sessions of one seed share system prompt and tools, as agents of one product do.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

from irminsul_traffic.traces import Message, TraceSession

SUBJECTS = (
    "the order",
    "a passenger",
    "the invoice",
    "this branch",
    "the sensor",
    "a parcel",
    "the ledger",
    "our index",
)
VERBS = ("shows", "lacks", "repeats", "confirms", "delays", "replaces", "counts", "rejects")
OBJECTS = ("an entry", "two fields", "the deadline", "a signature", "the total", "its label", "a permit", "every copy")
REASONS = (
    "since Monday",
    "after the update",
    "for no known reason",
    "as the rules demand",
    "twice a day",
    "at the gate",
)
THINGS = ("order", "flight", "file", "ticket", "route", "invoice", "sensor", "parcel")
ACTIONS = ("find", "list", "update", "cancel", "compare", "check")


def synthetic_sessions(
    count: int, *, turns: int = 6, tools: int = 6, documents: int = 4, sentences: int = 6, seed: int = 0
) -> Iterator[TraceSession]:
    """Yield ``count`` sessions of ``turns`` turns; ``sentences`` sets the length of each text. Deterministic."""
    shared = random.Random(f"shared {seed}")
    head: list[Message] = [
        {"role": "system", "content": "You are a careful assistant.\n" + _prose(shared, 3 * sentences)}
    ]
    names = [f"{action}_{thing}" for action in ACTIONS for thing in THINGS]
    head += [
        {"role": "tool_schema", "content": _schema(shared, name)}
        for name in shared.sample(names, min(tools, len(names)))
    ]
    for number in range(count):
        yield _session(number, turns, head, documents, sentences, random.Random(f"session {seed} {number}"))


def _session(
    number: int, turns: int, head: list[Message], documents: int, sentences: int, rng: random.Random
) -> TraceSession:
    messages = list(head)
    for document in range(documents):
        messages.append({"role": "doc", "content": f"Document {document}\n{_prose(rng, 2 * sentences)}"})
    messages.append({"role": "user", "content": f"Task {rng.randrange(10**6)}: {_prose(rng, 2)}"})
    prompts = [tuple(messages)]
    for turn in range(1, turns):
        thing = rng.choice(THINGS)
        call = json.dumps({"name": f"{rng.choice(ACTIONS)}_{thing}", "arguments": {"id": rng.randrange(10**6)}})
        messages.append({"role": "assistant", "content": f"{_prose(rng, 1)}\n{call}"})
        messages.append({"role": "tool", "content": f"Result {turn} for {thing}:\n{_prose(rng, sentences)}"})
        prompts.append(tuple(messages))
    return TraceSession(f"synthetic-{number}", tuple(prompts))


def _schema(rng: random.Random, name: str) -> str:
    properties = {
        key: {"type": "string", "description": _prose(rng, 1)}
        for key in ("id", "scope", rng.choice(THINGS) + "_filter")
    }
    return json.dumps({"name": name, "description": _prose(rng, 2), "parameters": {"properties": properties}})


def _prose(rng: random.Random, sentences: int) -> str:
    return " ".join(
        f"{rng.choice(SUBJECTS).capitalize()} {rng.randrange(1000)} {rng.choice(VERBS)} {rng.choice(OBJECTS)}"
        f" {rng.choice(REASONS)}."
        for _ in range(sentences)
    )
