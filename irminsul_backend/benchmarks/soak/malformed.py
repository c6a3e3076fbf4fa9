"""Requests that no client should send: the server lives, answers all of them, and keeps its inside to itself."""

from __future__ import annotations

import json
import random
import re
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from irminsul_backend.benchmarks.soak.desk import MOST_ERROR_BYTES, TRACEBACK
from irminsul_backend.benchmarks.soak.generated import KNOWN, MODELS, Malformed, generate, send
from irminsul_backend.benchmarks.soak.harness import Clock, Row, Soak, enough, share
from irminsul_backend.benchmarks.soak.serving import Watched
from irminsul_backend.benchmarks.soak.wire import Http, Wire
from irminsul_backend.config import ServerConfig

CLIENTS = 4
ROUND = 400
"""Requests between two canaries."""
MOST_DEATHS = 6
NAMELESS = re.compile(r"\d+|0x[0-9a-f]+|'[^']*'")


class Sender:
    """One client thread's connections, and what it saw."""

    def __init__(self, watched: Watched, number: int) -> None:
        self.http, self.wire = Http(watched.http, timeout=15), Wire(watched.grpc)
        self.rng = random.Random(number)
        self.recent: deque[Malformed] = deque(maxlen=ROUND)
        self.outcomes: Counter[str] = Counter()
        self.faults: dict[str, Malformed] = {}
        """The first request of each kind of bad answer."""

    def run(self, count: int) -> None:
        for _ in range(count):
            request = generate(self.rng)
            self.recent.append(request)
            status, text = send(request, self.http, self.wire)
            self.outcomes[status] += 1
            if status == "hung":
                self.faults.setdefault(f"hung: {request.kind}", request)
            elif TRACEBACK.search(text):
                self.faults.setdefault(f"inside shown: {NAMELESS.sub('*', text)[:90]}", request)
            elif len(text) > MOST_ERROR_BYTES and status == "refused":
                self.faults.setdefault(f"long message: {request.kind}", request)

    def close(self) -> None:
        self.http.close()
        self.wire.close()


def malformed(soak: Soak) -> Iterator[Row]:
    """Seeded requests of every kind on all models; after each round a canary must be answered."""
    wanted = soak.count(100_000, least=400)
    outcomes: Counter[str] = Counter()
    faults: dict[str, Malformed] = {}
    deaths: list[str] = []
    reached = 0
    with Watched(soak, "malformed", ServerConfig(log_level="CRITICAL", capacity_tokens=32_768)) as watched:
        clock = Clock(soak.seconds(180, least=20))
        while reached < wanted and clock.running and len(deaths) < MOST_DEATHS:
            senders = [Sender(watched, reached + n) for n in range(CLIENTS)]
            with ThreadPoolExecutor(CLIENTS) as threads:
                list(threads.map(Sender.run, senders, [min(ROUND, wanted) // CLIENTS] * CLIENTS))
            reached += sum(len(s.recent) for s in senders)
            for sender in senders:
                sender.close()
                outcomes += sender.outcomes
                faults = {**sender.faults, **faults}
            if watched.recover(f"round of malformed requests at {reached:,}"):
                suspects = [request for sender in senders for request in sender.recent]
                deaths.append(_minimal(soak, watched, suspects, len(deaths)))
            if clock.due():
                soak.say(f"{reached:,} of {wanted:,}; {dict(outcomes)}")
        segfaults = watched.segfaults()
    seen = ", ".join(f"{count:,} {what}" for what, count in outcomes.most_common())
    yield Row(
        f"malformed requests on {len(MODELS)} models",
        "as many as the time allows",
        f"{share(reached, wanted)}: {seen}",
        enough(reached, wanted),
    )
    killers = "; ".join(dict.fromkeys(deaths)) or "0 deaths"
    yield Row(
        "deaths that are not Triton's own",
        "0",
        killers[:600] + f"; {len(segfaults)} segfaults",
        reached > 0 and not deaths and not segfaults,
    )
    for bar, start in (("0 answers that show the inside", "inside"), ("0 hangs", "hung"), ("0 long messages", "long")):
        found = {what: request for what, request in faults.items() if what.startswith(start)}
        for number, request in enumerate(found.values()):
            (soak.found / f"{start}-{number}.json").write_text(_text(request), encoding="utf-8")
        yield Row("answers", bar, "; ".join(list(found)[:6]) or "0", reached > 0 and not found)
    own = "; ".join(f"{request} ({end})" for request, end in KNOWN.items())
    yield Row("Triton 2.51's own deaths, not sent", "listed", own, True)


def _minimal(soak: Soak, watched: Watched, suspects: list[Malformed], number: int) -> str:
    """The one request that stops a fresh server, or the kinds among which it is; kept in the folder of findings.

    Those of a kind go together, so that at most as many servers die as there are steps of bisection.
    """
    before = len(watched.deaths)
    while len(suspects) > 1 and len(watched.deaths) < before + 12:
        half, rest = suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]
        http, wire = Http(watched.http, timeout=5), Wire(watched.grpc)
        for request in half:
            send(request, http, wire, timeout=5)
            if watched.ended():
                break
        http.close()
        wire.close()
        suspects = half if watched.recover(f"bisecting {len(half)} requests") else rest
    path = soak.found / f"death-{number}.json"
    path.write_text("\n".join(_text(request) for request in suspects), encoding="utf-8")
    return f"{suspects[0].kind} ({path.name}, {len(suspects)} requests)"


def _text(request: Malformed) -> str:
    return json.dumps({**request._asdict(), "body": request.body[:20_000].decode("latin-1")})
