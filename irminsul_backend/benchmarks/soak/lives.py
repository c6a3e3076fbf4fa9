"""Many short lives under load, two servers at once, and a long one: none dies, none is seen to fault in the kernel."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from irminsul_backend.benchmarks.soak.harness import Clock, Row, Soak, enough, share
from irminsul_backend.benchmarks.soak.serving import Watched, kernel_log_is_readable
from irminsul_backend.benchmarks.soak.wire import Http
from irminsul_backend.config import ServerConfig

CLIENTS = 3
LIFE_SECONDS = 3.0
PATH = "/v2/models/irminsul_unary/generate"
CONFIG = ServerConfig(log_level="WARNING", threads=1, capacity_tokens=65_536)


class Load:
    """One-token requests of several clients, each with a session and a salt of its own, two turns a session."""

    def __init__(self, watched: Watched, seconds: float, most: int) -> None:
        self._watched, self._most = watched, most
        self._clock = Clock(seconds)
        self._lock = threading.Lock()
        self.sent = 0
        self.failures: list[str] = []
        with ThreadPoolExecutor(CLIENTS) as threads:
            list(threads.map(self._client, range(CLIENTS)))

    def _client(self, number: int) -> None:
        rng, http, turn = random.Random(number), Http(self._watched.http, timeout=60), 0
        while self._clock.running and not self.failures and self.sent < self._most:
            turn += 1
            ids = [rng.randrange(20, 8000) for _ in range(100)]
            name = f"life {number} {turn}"
            for tail in (0, 5):
                body: dict[str, Any] = {"input_ids": [*ids, *range(300, 300 + tail)], "max_tokens": 1}
                ends = {"session_id": name, "cache_salt": name, "session_end": bool(tail)}
                status, text = http.post(PATH, {**body, **ends, "ignore_eos": True})
                if status != 200:
                    self.failures.append(f"{status} {text}"[:160])
                with self._lock:
                    self.sent += 1
        http.close()


def lives(soak: Soak) -> Iterator[Row]:
    wanted, clock = soak.count(60, least=2), Clock(soak.seconds(330, least=30))
    deaths: list[str] = []
    faults: list[str] = []
    sent: list[int] = []

    def live(number: int) -> None:
        if not clock.running:
            return
        watched = Watched(soak, f"life-{number}", CONFIG)
        load = Load(watched, LIFE_SECONDS, 10**9)
        if load.failures or watched.ended():
            deaths.append(f"life {number}: {(load.failures or ['ended'])[0]}")
            watched.keep_log()
        watched.stop()
        faults.extend(watched.segfaults())
        sent.append(load.sent)
        if clock.due():
            soak.say(f"{len(sent)} of {wanted} lives, {len(deaths)} deaths, {len(faults)} segfaults")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(live, range(wanted)))
    yield Row(
        "short lives, two at once",
        "60 at scale 1, 0 deaths",
        f"{share(len(sent), wanted)}, {sum(sent):,} requests: {len(deaths)} deaths {deaths[:1] or ''}",
        enough(len(sent), wanted) and not deaths,
    )
    yield _fault_row("segfaults of their processes, shutdown included", faults, len(sent))
    most = soak.count(200_000, least=100)
    watched = Watched(soak, "long-life", CONFIG)
    load = Load(watched, soak.seconds(150, least=8), most)
    ended = bool(load.failures) or watched.ended()
    if ended:
        watched.keep_log()
    watched.stop()
    measured = f"{share(load.sent, most)}: {'died: ' + str(load.failures[:1]) if ended else '0 deaths'}"
    yield Row("one long life", f"{most:,} requests, 0 deaths", measured, not ended and enough(load.sent, most))
    yield _fault_row("its segfaults, shutdown included", watched.segfaults(), load.sent)


def _fault_row(what: str, faults: list[str], reached: int) -> Row:
    if not kernel_log_is_readable():
        return Row(what, "0 in the kernel's log", "the kernel's log cannot be read here", True)
    return Row(
        what, "0 in the kernel's log", f"{len(faults)} {faults[0][:110] if faults else ''}", reached > 0 and not faults
    )
