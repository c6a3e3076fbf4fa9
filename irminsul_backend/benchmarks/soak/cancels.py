"""Requests cancelled at any moment: nothing stays held, and whoever was not cancelled gets what a quiet run gives."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from irminsul_client import Client, IrminsulClientError, RequestTimeout

from irminsul_backend.benchmarks.soak.harness import Clock, Row, Soak, enough, share
from irminsul_backend.benchmarks.soak.serving import Watched
from irminsul_backend.config import ServerConfig

CAPACITY = 8192
CLIENTS = 8
PROMPTS = 48
CANCELLED = 0.3
EARLY, PREFILL = "within 2 ms, before look-up", "after 5 to 60 ms, in queue or prefill"
MOMENTS = (EARLY, PREFILL, "in decode", "at the end")
TOKENS = 4


class Cancels:
    """The requests of the check, and what became of them."""

    def __init__(self, url: str) -> None:
        self._clients = [Client(url, timeout=60) for _ in range(CLIENTS)]
        self.outcomes: Counter[str] = Counter()
        rng = random.Random(1)
        self._prompts = [[rng.randrange(16, 8000) for _ in range(rng.choice((20, 40, 90)))] for _ in range(PROMPTS)]
        self._long = [rng.randrange(16, 8000) for _ in range(600)]
        self._quiet = [self._clients[0].generate(**self._request(n)).token_ids for n in range(PROMPTS)]

    def _request(self, number: int) -> dict[str, Any]:
        ids = self._prompts[number % PROMPTS]
        return {"input_ids": ids, "max_tokens": TOKENS, "ignore_eos": True, "reuse": "exact"}

    def one(self, number: int) -> None:
        rng = random.Random(number)
        client = self._clients[number % CLIENTS]
        try:
            if rng.random() < CANCELLED:
                self._cancelled(client, number, rng)
            else:
                equal = client.generate(**self._request(number)).token_ids == self._quiet[number % PROMPTS]
                self.outcomes["equal" if equal else "different"] += 1
        except IrminsulClientError as error:
            self.outcomes[f"failed: {type(error).__name__}: {error}"[:100]] += 1

    def _cancelled(self, client: Client, number: int, rng: random.Random) -> None:
        moment = rng.choice(MOMENTS)
        request = self._request(number)
        after = {"in decode": rng.randrange(1, TOKENS), "at the end": TOKENS}.get(moment)
        if after is None:  # nothing comes that could be waited for: the client closes the call after a while
            request["input_ids"] = self._long[rng.randrange(200) :]
        if after is not None:
            chunks = client.stream(**request)
            seen = 0
            for chunk in chunks:
                seen += len(chunk.token_ids)
                if seen >= after:
                    break
            chunks.close()  # type: ignore[attr-defined]
        else:
            moment = self._broken_off(client, request, 0.0015 if moment == EARLY else rng.uniform(0.005, 0.06), moment)
        self.outcomes[f"cancelled {moment}"] += 1

    def _broken_off(self, client: Client, request: dict[str, Any], seconds: float, moment: str) -> str:
        """The client's own timeout cancels the call on the server as a closed connection does."""
        try:
            client.generate(timeout=seconds, **request)
        except RequestTimeout:
            return moment
        return "too late"

    def close(self) -> None:
        for client in self._clients:
            client.close()


def cancels(soak: Soak) -> Iterator[Row]:
    """A pool small enough that a leaked slot is missed: at the end one request must get every slot there is."""
    wanted = soak.count(10_000, least=200)
    with Watched(soak, "cancels", ServerConfig(log_level="WARNING", capacity_tokens=CAPACITY)) as watched:
        load = Cancels(watched.grpc)
        clock = Clock(soak.seconds(180, least=20))
        memory: list[int] = []
        reached, step = 0, max(CLIENTS, wanted // 40)
        with ThreadPoolExecutor(CLIENTS) as threads:
            while reached < wanted and clock.running and not watched.ended():
                list(threads.map(load.one, range(reached, reached + step)))
                reached += step
                memory.append(watched.resident())
                if clock.due():
                    soak.say(f"{reached:,} of {wanted:,}")
        load.close()
        told = watched.metric("irminsul_requests_total", "cancelled")
        yield from _outcome_rows(load.outcomes, reached, wanted, told)
        yield from _pool_rows(watched)
        base = memory[len(memory) // 4] if memory else 0
        growth = memory[-1] / base - 1 if base else 0.0
        measured = f"{growth:+.1%} from {base / 1e6:,.0f} MB over the last three quarters"
        yield Row("memory of the server's processes", "flat within 5 %", measured, base > 0 and abs(growth) <= 0.05)
        alive = not watched.ended() and not watched.segfaults()
        yield Row("the server", "0 deaths", "alive" if alive else f"ended {watched.segfaults()[:1]}", alive)


def _outcome_rows(outcomes: Counter[str], reached: int, wanted: int, told: float) -> Iterator[Row]:
    cancelled = {moment: outcomes[f"cancelled {moment}"] for moment in MOMENTS}
    measured = f"{share(reached, wanted)}; " + ", ".join(f"{count:,} {moment}" for moment, count in cancelled.items())
    measured += f"; the server counted {told:,.0f}"
    yield Row("requests, 30 % cancelled", "as many as the time allows", measured, enough(reached, wanted))
    bad = {what: count for what, count in outcomes.items() if what.startswith(("failed", "different"))}
    measured = f"{outcomes['equal']:,} equal" + "".join(f"; {count} {what}" for what, count in bad.items())[:300]
    yield Row("those not cancelled", "equal to a quiet run", measured, not bad and outcomes["equal"] > 0)


def _pool_rows(watched: Watched) -> Iterator[Row]:
    time.sleep(1)
    capacity = watched.metric("irminsul_cache_slots", '"capacity"')
    prompt = [16 + n % 7000 for n in range(CAPACITY - 1)]
    with Client(watched.grpc, timeout=60) as client:
        try:
            client.generate(input_ids=prompt, max_tokens=1, reuse="off")
            answer = "answered"
        except IrminsulClientError as error:
            answer = f"{type(error).__name__}: {error}"[:160]
    used = watched.metric("irminsul_cache_slots", '"used"')
    measured = f"{answer}; {used:,.0f} of {capacity:,.0f} slots used after it"
    bar = f"a request for {CAPACITY:,} slots is answered: none is held or lost"
    yield Row("slots held at the end", bar, measured, answer == "answered" and used <= capacity == CAPACITY)
