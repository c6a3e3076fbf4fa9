"""`make bench`: what the server gains and costs, as ratios taken side by side in one run on the shipped model.

    OMP_WAIT_POLICY=passive python -m irminsul_backend.benchmarks [--only PART ...] [--json FILE]

The variable is what the server gives its own engine; the engine in this process must run like it. Absolute times
depend on the machine; the ratios are what is compared with the bars.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil
from irminsul_client import Client
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from irminsul_backend.benchmarks.tokenizing import changed_message
from irminsul_backend.cache import POLICIES, CachedSequence, PICache, Registry, plan
from irminsul_backend.chunking import PRESETS, cut, fingerprint
from irminsul_backend.config import DEMO_MODEL, ServerConfig
from irminsul_backend.engine import Engine
from irminsul_backend.protocol import Event, GenerationRequest
from irminsul_backend.request_spec import SamplingParams
from irminsul_backend.triton_io.server.launcher import Server, running_server

PROMPT_TOKENS, KNOWN_TOKENS = 8192, 7782
FIRST_ID, VOCAB = 16, 8192
"""Random prompts use ids from FIRST_ID on: those below are special tokens."""


class Bench:
    def __init__(self, server: Server, progress: Progress) -> None:
        self.server, self.progress = server, progress
        self.rng = np.random.default_rng(0)
        self.client = Client(server.grpc_url)

    def ids(self, n: int) -> np.ndarray:
        return self.rng.integers(FIRST_ID, VOCAB, n).astype(np.int32)

    def shifted(self, repeats: int = 9) -> dict[str, Any]:
        """An 8,192-token prompt, 95 % of it known and moved: a new header before it, new text after it."""
        off, content, reused = [], [], 0
        for i in self.progress.track(range(repeats + 1), description="shifted prompt"):
            body = self.ids(KNOWN_TOKENS + 32)
            salt = f"bench {i}"
            known = np.concatenate((self.ids(40), body)).tolist()
            self.client.generate(input_ids=known, max_tokens=1, cache_salt=salt)
            prompt = np.concatenate((self.ids(51), body, self.ids(PROMPT_TOKENS - 51 - len(body)))).tolist()
            warm = self.client.generate(input_ids=prompt, max_tokens=1, reuse="content", cache_salt=salt)
            cold = self.client.generate(input_ids=prompt, max_tokens=1, reuse="off", cache_salt=salt)
            assert warm.usage is not None
            if i:  # the first round warms up
                reused = warm.usage.shifted_tokens
                off.append(cold.ttft_ms)
                content.append(warm.ttft_ms)
        ratios = [a / b for a, b in zip(off, content, strict=True)]
        return {
            "prompt_tokens": PROMPT_TOKENS,
            "shifted_tokens": reused,
            "ttft_off_ms": statistics.median(off),
            "ttft_content_ms": statistics.median(content),
            "ratio": statistics.median(ratios),
            "bar": "ratio >= 8",
            "met": statistics.median(ratios) >= 8,
        }

    def stream(self, repeats: int = 150, tokens: int = 24) -> dict[str, Any]:
        """Time per streamed token through gRPC and the ensemble, against the same engine in this process."""
        engine = Engine.from_config(ServerConfig(capacity_tokens=4096))
        engine.start()
        prompt = self.ids(64)
        served, direct = [], []
        for i in self.progress.track(range(repeats + 1), description="streaming"):
            answer = self.client.generate(
                input_ids=prompt.tolist(), max_tokens=tokens, reuse="exact", ignore_eos=True, cache_salt="bench stream"
            )
            times = _direct(engine, prompt, tokens, f"direct {i}")
            if i:
                served.append(sum(answer.inter_token_ms) / len(answer.inter_token_ms))
                direct.append(1000 * (times[-1] - times[0]) / (len(times) - 1))
        engine.close()
        differences = [a - b for a, b in zip(served, direct, strict=True)]
        low, added, high = statistics.quantiles(differences, n=4)
        return {
            "served_ms_per_token": statistics.median(served),
            "in_process_ms_per_token": statistics.median(direct),
            "added_ms_per_token": added,
            "added_quartiles_ms": [round(low, 3), round(high, 3)],
            "bar": "added <= 0.4 ms",
            "met": added <= 0.4,
        }

    def memory(self, requests: int = 1000, warm_up: int = 2000) -> dict[str, Any]:
        """Resident memory of the server and its stubs over 1,000 requests, eight at a time, once the cache is full."""
        base = [self.ids(300) for _ in range(8)]

        def one(i: int) -> None:
            prompt = np.concatenate((np.full(1 + i % 7, 20 + i % 900), base[i % 8], 20 + np.arange(i % 50)))
            self.client.generate(input_ids=prompt.tolist(), max_tokens=4)

        samples = []
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(one, range(warm_up)))
            for i in self.progress.track(range(0, requests, 250), description="memory"):
                samples.append(self._resident_mb())
                list(pool.map(one, range(i, i + 250)))
        samples.append(self._resident_mb())
        growth = samples[-1] - samples[0]
        return {
            "resident_mb": samples,
            "growth_mb": growth,
            "bar": "growth <= 1 % over 1,000 requests",
            "met": growth <= 0.01 * samples[0],
        }

    def _resident_mb(self) -> float:
        root = psutil.Process(self.server.process.pid)
        num_bytes: int = sum(p.memory_info().rss for p in [root, *root.children(recursive=True)])
        return round(num_bytes / 1e6, 1)


def planning(progress: Progress, repeats: int = 9, cached: int = 10_000_000) -> dict[str, Any]:
    """One core, no server: cut and fingerprint a 100,000-token prompt, plan it against 10 million cached tokens."""
    preset, rng, piece = PRESETS["default"], np.random.default_rng(0), 50_000
    no_slots, exact = np.empty(0, np.int32), np.zeros(piece, np.int16)
    registry, donors = Registry(), []
    for _ in range(cached // piece):
        ids = rng.integers(0, 129_000, piece).astype(np.int32)
        ends = cut(ids, preset)
        prints = fingerprint(ids, ends, "n")
        donors.append(CachedSequence("n", "", ids, no_slots, exact, ends, prints, length=piece))
    before = psutil.Process().memory_info().rss
    for donor in progress.track(donors, description="registering"):
        registry.publish(donor)
    index_bytes = (psutil.Process().memory_info().rss - before) / cached
    places = zip(rng.integers(0, len(donors), 95), rng.integers(100, piece - 1000, 95), strict=True)
    moved = [donors[i].token_ids[at : at + 1000] for i, at in places]
    prompt = np.concatenate((rng.integers(0, 129_000, 5000), *moved)).astype(np.int32)
    cutting, planned = [], []
    for _ in range(repeats):
        start = time.perf_counter()
        ends = cut(prompt, preset)
        prints = fingerprint(prompt, ends, "n")
        middle = time.perf_counter()
        plan(
            registry,
            "n",
            prompt,
            ends,
            prints,
            policy=POLICIES["content"],
            extension=True,
            min_segment=preset.min_segment,
        )
        cutting.append(1000 * (middle - start))
        planned.append(1000 * (time.perf_counter() - middle))
    cut_ms, plan_ms = statistics.median(cutting), statistics.median(planned)
    return {
        "cut_and_fingerprint_ms": cut_ms,
        "plan_ms": plan_ms,
        "index_bytes_per_cached_token": index_bytes,
        "bar": "cut <= 10 ms, plan <= 20 ms, index <= 24 bytes",
        "met": cut_ms <= 10 and plan_ms <= 20 and index_bytes <= 24,
    }


def bookkeeping(progress: Progress, cached: int = 10_000_000, piece: int = 50_000) -> dict[str, Any]:
    """CPU time, one core, no server: a full pool of 10 million tokens checked in parts; slots taken for an answer."""
    preset, rng = PRESETS["default"], np.random.default_rng(0)
    cache = PICache(cached, preset)

    def admit(n: int, max_new: int) -> CachedSequence:
        ids = rng.integers(0, 129_000, n).astype(np.int32)
        ends = cut(ids, preset)
        prints = fingerprint(ids, ends, "n")
        admission = cache.admit(
            ids, ends, prints, namespace="n", session_id="", policy=POLICIES["off"], max_new=max_new
        )
        assert admission is not None
        cache.advance(admission.sequence, n)
        return admission.sequence

    def timed(action: Callable[[], Any]) -> float:
        start = time.thread_time()  # what else the machine does is left out
        action()
        return 1000 * (time.thread_time() - start)

    for _ in progress.track(range(cached // piece), description="filling"):
        cache.retire(admit(piece, 0))
    parts, ended = [], False

    def check() -> None:
        nonlocal ended
        ended = cache.check_some()

    while not ended:
        parts.append(timed(check))
    sequence, taken = admit(1000, 4000), []
    for token in range(4000):
        taken.append(timed(lambda: cache.reserve(sequence)))
        cache.append(sequence, token)
        cache.advance(sequence, sequence.length + 1)
    median, worst = statistics.median(parts), statistics.quantiles(parts, n=100)[-1]
    return {
        "whole_check_ms": timed(cache.check_integrity),
        "partial_check_ms": median,
        "partial_check_p99_ms": worst,
        "calls_a_pass": len(parts),
        "reserve_us_per_token": 1000 * statistics.mean(taken),
        "reserve_worst_ms": max(taken),
        "bar": "partial check <= 2 ms (median)",
        "met": median <= 2,
    }


def tokenising(progress: Progress) -> dict[str, Any]:
    """One core, no server: a 100,000-token prompt with one changed message, against the same never seen."""
    task = progress.add_task("tokenising", total=None)
    result = changed_message(DEMO_MODEL)
    progress.update(task, total=1, completed=1)
    return result


def _direct(engine: Engine, prompt: np.ndarray, tokens: int, key: str) -> list[float]:
    """Times at which the engine reported each token."""
    times: list[float] = []
    done = threading.Event()

    def on_event(event: Event) -> None:
        if event.token_ids:
            times.append(time.perf_counter())
        if event.kind in ("finished", "error"):
            done.set()

    ends = cut(prompt, PRESETS["default"], None)
    request = GenerationRequest(key=key, namespace="n", reuse="exact", sampling=SamplingParams(max_tokens=tokens))
    engine.submit(request, prompt, ends, fingerprint(prompt, ends, "n"), on_event)
    done.wait(120)
    return times


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Benchmarks of the planner and of the served demo model, side by side.",
        epilog="The engine on a GPU: python -m irminsul_backend.benchmarks.gpu_engine.",
    )
    alone: dict[str, Callable[[Progress], dict[str, Any]]] = {
        "planning": planning,
        "bookkeeping": bookkeeping,
        "tokenising": tokenising,
    }
    served: dict[str, Callable[[Bench], dict[str, Any]]] = {
        "shifted": Bench.shifted,
        "stream": Bench.stream,
        "memory": Bench.memory,
    }
    names = (*alone, *served)
    parser.add_argument("--only", nargs="+", choices=names, default=names, help="parts to run (default: all)")
    parser.add_argument("--json", metavar="FILE", help="also write the figures to FILE")
    args = parser.parse_args()
    console = Console()
    results: dict[str, dict[str, Any]] = {}
    with Progress(console=console, transient=True) as progress:
        results.update({name: part(progress) for name, part in alone.items() if name in args.only})
        if set(args.only) & set(served):
            with running_server() as server:
                bench = Bench(server, progress)
                results.update({name: part(bench) for name, part in served.items() if name in args.only})
                bench.client.close()
    for name, result in results.items():
        about = (alone | served)[name].__doc__ or ""
        table = Table(title=about.strip(), title_justify="left", show_header=False)
        for key, value in result.items():
            table.add_row(key, f"{value:.3f}" if isinstance(value, float) else str(value))
        console.print(table)
    if args.json:
        with open(args.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
