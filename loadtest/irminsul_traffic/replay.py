"""Replaying recorded sessions against a server: several at once, the turns of each in order.

``replay`` does the work and knows no terminal; ``render_report`` turns its records into tables.
"""

from __future__ import annotations

import hashlib
import queue
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from irminsul_client import Client, IrminsulClientError, Reuse, ServerError, Session
from rich.console import Group
from rich.table import Table

from irminsul_traffic.traces import Message, TraceSession

MAX_SESSION_ID_BYTES = 128
SHOWN_ERRORS = 5


@dataclass(frozen=True)
class ReplayOptions:
    """What is the same for every request of a replay."""

    sessions: int = 1
    """How many sessions run at once."""
    turns: int | None = None
    """Only the first turns of each session."""
    reuse: Reuse | None = None
    """None leaves it to the server."""
    max_tokens: int = 16
    cache_salt: str | None = None


@dataclass(frozen=True)
class TurnRecord:
    """One request of a replay; the counts are None where it failed."""

    session: str
    turn: int
    prompt_tokens: int | None = None
    exact_tokens: int | None = None
    shifted_tokens: int | None = None
    computed_tokens: int | None = None
    completion_tokens: int | None = None
    segments: int | None = None
    ttft_ms: float | None = None
    inter_token_ms: tuple[float, ...] = ()
    text: str = ""
    error: str | None = None


@dataclass
class _Work:
    """What the worker threads share."""

    sessions: Iterator[tuple[int, TraceSession]]
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    done: queue.Queue[tuple[int, TurnRecord] | BaseException | None] = field(default_factory=queue.Queue)

    def next_session(self) -> tuple[int, TraceSession] | None:
        with self.lock:
            return None if self.stop.is_set() else next(self.sessions, None)


def replay(
    client: Client,
    sessions: Iterable[TraceSession],
    options: ReplayOptions,
    on_turn: Callable[[TurnRecord], None] = lambda record: None,
) -> list[TurnRecord]:
    """Send every turn and return the records in the order of the trace.

    ``on_turn`` is called in this thread after each request. A request that fails is recorded and its session goes on.
    On KeyboardInterrupt the client is closed, which cancels what is running, and the exception goes on.
    """
    prefix = uuid.uuid4().hex[:8]
    work = _Work(iter(enumerate(sessions)))
    threads = [
        threading.Thread(target=_worker, args=(client, work, options, prefix), daemon=True)
        for _ in range(max(1, options.sessions))
    ]
    for thread in threads:
        thread.start()
    records: list[tuple[int, TurnRecord]] = []
    try:
        running = len(threads)
        while running:
            item = work.done.get()
            if item is None:
                running -= 1
            elif isinstance(item, BaseException):
                raise item
            else:
                records.append(item)
                on_turn(item[1])
    except BaseException:
        work.stop.set()
        client.close()
        raise
    finally:
        for thread in threads:
            thread.join()
    records.sort(key=lambda item: (item[0], item[1].turn))
    return [record for _, record in records]


def _worker(client: Client, work: _Work, options: ReplayOptions, prefix: str) -> None:
    try:
        while (item := work.next_session()) is not None:
            number, recorded = item
            session = client.session(
                server_session_id(prefix, number, recorded.session_id), cache_salt=options.cache_salt
            )
            turns = recorded.turns[: options.turns]
            for turn, messages in enumerate(turns):
                if work.stop.is_set():
                    break
                record = _send(session, recorded.session_id, turn, messages, turn == len(turns) - 1, options)
                work.done.put((number, record))
    except BaseException as error:  # e.g. a damaged line further down in the trace: the caller's thread raises it
        work.done.put(error)
    finally:
        work.done.put(None)


def server_session_id(prefix: str, number: int, session_id: str) -> str:
    """An id that no other replay uses and that two equal ids of a trace do not share; at most 128 bytes of UTF-8."""
    full = f"{prefix}-{number}/{session_id}"
    if len(full.encode()) <= MAX_SESSION_ID_BYTES:
        return full
    return f"{prefix}-{number}/{hashlib.sha256(session_id.encode()).hexdigest()}"


def _send(
    session: Session, name: str, turn: int, messages: Sequence[Message], last: bool, options: ReplayOptions
) -> TurnRecord:
    try:
        answer = session.generate(messages=messages, max_tokens=options.max_tokens, reuse=options.reuse, end=last)
        usage = answer.usage
        if usage is None:
            raise ServerError("the answer carries no usage")
        parts = usage.exact_tokens + usage.shifted_tokens + usage.computed_tokens
        if parts != usage.prompt_tokens:
            raise ServerError(f"exact + shifted + computed is {parts}, but the prompt has {usage.prompt_tokens} tokens")
    except IrminsulClientError as error:
        return TurnRecord(name, turn, error=f"{type(error).__name__}: {error}")
    return TurnRecord(
        session=name,
        turn=turn,
        prompt_tokens=usage.prompt_tokens,
        exact_tokens=usage.exact_tokens,
        shifted_tokens=usage.shifted_tokens,
        computed_tokens=usage.computed_tokens,
        completion_tokens=usage.completion_tokens,
        segments=usage.segments,
        ttft_ms=answer.ttft_ms,
        inter_token_ms=answer.inter_token_ms,
        text=answer.text,
    )


def summarise(records: Sequence[TurnRecord], wall_s: float) -> dict[str, Any]:
    """Totals, shares of the prompt tokens, and median and p95 of the times in ms (None where nothing was measured)."""
    good = [r for r in records if r.error is None]
    totals = {
        name: sum(getattr(r, name) for r in good)
        for name in ("prompt_tokens", "exact_tokens", "shifted_tokens", "computed_tokens", "completion_tokens")
    }
    prompt = totals["prompt_tokens"]
    return {
        "requests": len(records),
        "errors": len(records) - len(good),
        "sessions": len({r.session for r in records}),
        **totals,
        "shares": {
            source: totals[f"{source}_tokens"] / prompt if prompt else None
            for source in ("exact", "shifted", "computed")
        },
        "ttft_ms": _quantiles([r.ttft_ms for r in good if r.ttft_ms is not None]),
        "inter_token_ms": _quantiles([gap for r in good for gap in r.inter_token_ms]),
        "wall_s": wall_s,
    }


def _quantiles(values: Sequence[float]) -> dict[str, float | None]:
    if not values:
        return {"median": None, "p95": None}
    return {"median": float(np.percentile(values, 50)), "p95": float(np.percentile(values, 95))}


def as_json(records: Sequence[TurnRecord], summary: dict[str, Any]) -> dict[str, Any]:
    """What ``--json`` writes: one object a request, and the summary."""
    return {"requests": [asdict(r) for r in records], "summary": summary}


def render_report(records: Sequence[TurnRecord], summary: dict[str, Any]) -> Group:
    """The tables printed after a replay: tokens by source, times, and the first errors."""
    tokens = Table(title=f"{summary['requests']} requests in {summary['wall_s']:.1f} s")
    for column in ("prompt tokens", "tokens", "share"):
        tokens.add_column(column, justify="left" if column == "prompt tokens" else "right")
    for source in ("exact", "shifted", "computed"):
        share = summary["shares"][source]
        tokens.add_row(source, f"{summary[f'{source}_tokens']:,}", "-" if share is None else f"{share:.1%}")
    tokens.add_row("all", f"{summary['prompt_tokens']:,}", "", end_section=True)
    tokens.add_row("generated", f"{summary['completion_tokens']:,}", "")

    times = Table()
    for column in ("time", "median ms", "p95 ms"):
        times.add_column(column, justify="left" if column == "time" else "right")
    for name, label in (("ttft_ms", "to the first token"), ("inter_token_ms", "between tokens")):
        times.add_row(label, *("-" if v is None else f"{v:,.1f}" for v in summary[name].values()))

    parts: list[Any] = [tokens, times]
    failed = [r for r in records if r.error is not None]
    if failed:
        errors = Table(
            title=f"{len(failed)} errors" + (f", the first {SHOWN_ERRORS}" if len(failed) > SHOWN_ERRORS else "")
        )
        for column in ("session", "turn", "error"):
            errors.add_column(column)
        for r in failed[:SHOWN_ERRORS]:
            errors.add_row(r.session, str(r.turn), r.error)
        parts.append(errors)
    else:
        parts.append("0 errors")
    return Group(*parts)
