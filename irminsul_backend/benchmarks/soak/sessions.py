"""Sessions that nobody ends: new requests are answered, or refused with a clear error, at once."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic

from irminsul_backend.benchmarks.soak.desk import TRACEBACK
from irminsul_backend.benchmarks.soak.harness import Clock, Row, Soak, milliseconds, share
from irminsul_backend.benchmarks.soak.serving import Watched
from irminsul_backend.benchmarks.soak.wire import Wire
from irminsul_backend.config import ServerConfig

OPENERS = 16
PATIENCE, BAR_SECONDS = 2.0, 1.0


def sessions(soak: Soak) -> Iterator[Row]:
    """Opens them over gRPC, then asks: with new sessions, and with none (over HTTP's endpoints)."""
    wanted, asked = soak.count(20_000), soak.count(100, least=20)
    with Watched(soak, "sessions", ServerConfig(log_level="ERROR")) as watched:
        wires = [Wire(watched.grpc) for _ in range(OPENERS)]
        clock = Clock(soak.seconds(240, least=20))
        outcomes: Counter[str] = Counter()

        def open_one(number: int) -> str:
            if not clock.running:
                return "not sent"
            wire = wires[number % OPENERS]
            name = f"never ended {number}"
            reply = wire.ask("irminsul", name, flags=1, timeout=PATIENCE, text_input="Hello", max_tokens=1)
            if clock.due():
                soak.say(f"session {number:,} of {wanted:,}")
            return "hung" if reply.hung else reply.error or "opened"

        with ThreadPoolExecutor(OPENERS) as threads:
            outcomes.update(threads.map(open_one, range(wanted)))
        reached = wanted - outcomes["not sent"]
        slowest, bad = 0.0, Counter[str]()
        for number in range(asked):
            name = uuid.uuid4().hex
            model, session = ("irminsul", name) if number % 2 else ("irminsul_unary", None)
            began = monotonic()
            reply = wires[0].ask(model, session, timeout=PATIENCE, text_input="Hello", max_tokens=1)
            took = monotonic() - began
            slowest = max(slowest, took)
            if reply.hung or TRACEBACK.search(reply.error) or took > BAR_SECONDS:
                bad[f"{model}: {'hung' if reply.hung else reply.error[:80] or 'late'}"] += 1
        for wire in wires:
            wire.close()
        refused = reached - outcomes["opened"] - outcomes["hung"]
        yield Row(
            "sessions opened and never ended",
            "all opened, or refused with an error",
            f"{share(reached, wanted)}: {outcomes['opened']:,} opened, {refused:,} refused, {outcomes['hung']:,} hung",
            reached == wanted and not outcomes["hung"],
        )
        measured = f"{asked - sum(bad.values())} of {asked}; slowest {milliseconds(slowest)}"
        if bad:
            measured += f"; {bad.most_common(1)[0][0]}"
        yield Row(f"{asked} new requests after that", "answered or refused within 1 s", measured, not bad)
        yield Row("the server", "alive", "alive" if not watched.ended() else "ended", not watched.ended())
