"""What one tenant's requests may know of another's: nothing, over any endpoint."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import httpx
from irminsul_client import Client
from irminsul_traffic.replay import ReplayOptions, TurnRecord, replay
from irminsul_traffic.synthetic import synthetic_sessions
from irminsul_traffic.traces import TraceSession, read_trace

from irminsul_backend.benchmarks.soak.harness import Row, Soak
from irminsul_backend.benchmarks.soak.packets import IDS
from irminsul_backend.benchmarks.soak.serving import Watched
from irminsul_backend.benchmarks.soak.wire import Wire
from irminsul_backend.config import ServerConfig

TRACE = "rag_hotpot.jsonl.zst"
SESSIONS = 20
CAPACITY = 1_000_000


def tenants(soak: Soak) -> Iterator[Row]:
    """One trace by two tenants and again by the first; then requests without a salt on a server that requires one."""
    path = soak.traces / TRACE
    count = soak.count(SESSIONS, least=4)
    if path.exists():
        recorded, source = list(islice(read_trace(path), count)), TRACE
    else:
        recorded, source = list(synthetic_sessions(count)), f"made-up sessions ({path} is not there)"
    with Watched(soak, "tenants", ServerConfig(log_level="WARNING", capacity_tokens=CAPACITY)) as watched:
        with Client(watched.grpc) as client:
            first, second, again = (_replayed(soak, client, recorded, salt) for salt in ("one", "two", "one"))
        yield from _compared(first, second, again, source)
        yield Row("the server", "0 deaths", "ended" if watched.ended() else "0 deaths", not watched.ended())
    config = ServerConfig(log_level="WARNING", require_cache_salt=True)
    with Watched(soak, "tenants-strict", config) as watched:
        yield from _without_salt(watched)


def _replayed(soak: Soak, client: Client, recorded: Sequence[TraceSession], salt: str) -> list[TurnRecord]:
    soak.say(f"{len(recorded)} sessions under the salt {salt!r}")
    return replay(client, recorded, ReplayOptions(max_tokens=1, cache_salt=salt))


def _compared(first: list[TurnRecord], second: list[TurnRecord], again: list[TurnRecord], source: str) -> Iterator[Row]:
    failed = [r.error for r in (*first, *second, *again) if r.error]
    yield Row(
        f"{source} three times",
        "no failures",
        f"{len(first) * 3:,} requests; {failed[:1] or 'no failures'}",
        not failed,
    )

    def reused(records: list[TurnRecord]) -> list[int]:
        return [(r.exact_tokens or 0) + (r.shifted_tokens or 0) for r in records]

    crossed = sum(max(0, b - a) for a, b in zip(reused(first), reused(second), strict=True))
    texts = sum(a.text != b.text for a, b in zip(first, second, strict=True))
    measured = f"{crossed} tokens beyond the first tenant's own; {texts} other answers"
    yield Row("another salt", "0 tokens shared, equal answers", measured, not crossed and not texts)
    missing = sum((r.computed_tokens or 0) - 1 for r in again)
    total = sum(r.prompt_tokens or 0 for r in again)
    yield Row(
        "the same salt again", "all tokens but each prompt's last", f"{missing} of {total:,} computed", not missing
    )


def _without_salt(watched: Watched) -> Iterator[Row]:
    """A prompt by one session, then by every other kind of caller; last by the session's own next turn."""
    wire = Wire(watched.grpc)
    crossed: dict[str, str] = {}

    def over_stream(session: int | str, flags: int = 3, what: str = "") -> int:
        reply = wire.ask("irminsul", session, flags, input_ids=IDS, max_tokens=1)
        if reply.error:
            return _noted(crossed, what, reply.error)
        return _noted(crossed, what, reply.usage)

    def over_http(model: str, what: str, **more: Any) -> int:
        body = {"input_ids": IDS.tolist(), "max_tokens": 1, **more}
        answer = httpx.post(f"{watched.http}/v2/models/{model}/generate", json=body, timeout=30).json()
        return _noted(crossed, what, json.loads(answer["usage"]) if "usage" in answer else answer["error"])

    over_stream("owner", 1)
    for name in ("a new session", "a number"):
        over_stream(uuid.uuid4().hex if name == "a new session" else 4711, what=name)
    over_stream(77, 1)
    over_stream("77", 1, what="the text '77' beside the number 77")
    for model in ("irminsul_generate", "irminsul_unary"):
        over_http(model, f"{model} without a session")
        over_http(model, f"{model} with another session", session_id=uuid.uuid4().hex)
    reply = wire.ask("irminsul_unary", input_ids=IDS, max_tokens=1, timeout=30)
    _noted(crossed, "irminsul_unary over gRPC", reply.error or reply.usage)
    own = over_stream("owner", 2)
    over_stream("owner", 3, what="who opens the id again after its end")
    wire.close()
    measured = "; ".join(f"{who}: {what}" for who, what in crossed.items() if what) or "0 tokens"
    yield Row(
        "no salt under require_cache_salt", f"0 tokens to {len(crossed)} others", measured, not any(crossed.values())
    )
    yield Row("its own session's next turn", f"{len(IDS) - 1} tokens", f"{own} tokens", own == len(IDS) - 1)


def _noted(crossed: dict[str, str], what: str, found: dict[str, Any] | str) -> int:
    """Tokens reused; they, or the error, are kept under the name of a caller who must have none."""
    tokens = -1 if isinstance(found, str) else int(found["exact_tokens"]) + int(found["shifted_tokens"])
    if what:
        crossed[what] = found[:100] if isinstance(found, str) else f"{tokens} tokens" if tokens else ""
    return tokens
