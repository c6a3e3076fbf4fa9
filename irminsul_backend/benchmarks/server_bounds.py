"""What one client can take from another on a real server: `python -m irminsul_backend.benchmarks.server_bounds`.

Small requests beside a stream of 1 MiB texts that have to be tokenised before they can be refused for their length, and
new requests after many sessions that nobody ended. Prints one JSON object for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import queue
import random
import shutil
import tempfile
import time
import uuid
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput

from irminsul_backend.config import DEMO_MODEL, ServerConfig
from irminsul_backend.triton_io.server.launcher import running_server

POSITIONS = 300_000
"""Of the model served here: fewer than a large text's tokens, more than can be told without tokenising it."""
LARGE_BYTES = 1 << 20
WORDS = "result the user profile status Error: timeout path value née items and 東京 [<x>]".split()  # noqa: SIM905


class Stream:
    """One gRPC stream; its requests are sessions of their own unless they are given one."""

    def __init__(self, url: str) -> None:
        self._client = InferenceServerClient(url)
        self._results: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._client.start_stream(lambda result, error: self._results.put((result, error)))

    def send(self, text: str, session: str = "", end: bool = True) -> None:
        """Send a request for one token."""
        inputs = []
        for name, kind, value in (("text_input", "BYTES", text.encode()), ("max_tokens", "INT32", 1)):
            tensor = InferInput(name, [1, 1], kind)
            tensor.set_data_from_numpy(np.array([[value]], np.object_ if kind == "BYTES" else np.int32))
            inputs.append(tensor)
        self._client.async_stream_infer(
            "irminsul", inputs, sequence_id=session or uuid.uuid4().hex, sequence_start=True, sequence_end=end
        )

    def receive(self, timeout_s: float) -> str:
        """Wait for a request's one response; returns its error, or ""."""
        error = self._results.get(timeout=timeout_s)[1]
        return error.message() if error else ""

    def seconds(self, text: str, timeout_s: float = 60) -> float:
        """How long a request takes."""
        start = time.perf_counter()
        self.send(text)
        self.receive(timeout_s)
        return time.perf_counter() - start

    def close(self) -> None:
        """End the stream."""
        self._client.close()


def send_large_texts(url: str, running: Event, refused: Synchronized[int]) -> None:
    """Send one large text after the other while `running` is set, in a process of its own, and count the refusals."""
    rng = random.Random(0)
    large = " ".join(rng.choice(WORDS) + str(rng.randrange(1000)) for _ in range(LARGE_BYTES // 5))[:LARGE_BYTES]
    stream = Stream(url)
    while running.wait():
        stream.send(f"{rng.random()} {large}")
        if "limit" in stream.receive(60):
            refused.value += 1


def beside_large_texts(url: str, rounds: int, requests: int) -> dict[str, Any]:
    """Times of small requests, alone and beside one client's large texts, in alternating rounds."""
    context = multiprocessing.get_context("spawn")
    running, refused = context.Event(), context.Value("i", 0)
    other = context.Process(target=send_large_texts, args=(url, running, refused), daemon=True)
    other.start()
    small = Stream(url)
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for disturbed in (False, True):
            if disturbed:
                running.set()
            else:
                running.clear()
            time.sleep(2)  # what is under way ends, or begins
            times[disturbed] += [small.seconds("Hello") for _ in range(requests)]
    other.kill()
    small.close()
    figures = {
        f"{name}_{q}_ms": round(1000 * float(np.quantile(times[disturbed], q / 100)), 1)
        for disturbed, name in ((False, "alone"), (True, "beside"))
        for q in (50, 95)
    }
    ratio = figures["beside_95_ms"] / figures["alone_95_ms"]
    return {**figures, "large_refused": refused.value, "p95_ratio": round(ratio, 2), "bar": "<= 3", "met": ratio <= 3}


def after_open_sessions(url: str, sessions: int, requests: int = 100) -> dict[str, Any]:
    """Times of new requests after `sessions` were opened, by requests that are refused, and never ended."""
    stream = Stream(url)
    longest: float | None = None
    with contextlib.suppress(queue.Empty):  # a request was not answered
        for begin in range(0, sessions, 200):
            numbers = range(begin, min(begin + 200, sessions))
            for number in numbers:
                stream.send("", session=f"open-{number}", end=False)
            for _ in numbers:
                stream.receive(20)
        longest = max(stream.seconds("Hello", timeout_s=20) for _ in range(requests))
    stream.close()
    met = longest is not None and longest <= 1
    return {"open_sessions": sessions, "requests": requests, "longest_s": longest, "bar": "<= 1", "met": met}


def main() -> None:
    """Measure against a server of the shipped model with more positions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--requests", type=int, default=100, help="small requests in each round")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(DEMO_MODEL, folder, dirs_exist_ok=True)
        path = Path(folder) / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": POSITIONS}))
        config = ServerConfig(model=folder, threads=1, capacity_tokens=16_384, log_level="WARNING")
        with running_server(config) as server:
            print(
                json.dumps(
                    {"bench": "small requests", **beside_large_texts(server.grpc_url, args.rounds, args.requests)}
                ),
                flush=True,
            )
            print(json.dumps({"bench": "sessions", **after_open_sessions(server.grpc_url, args.sessions)}), flush=True)


if __name__ == "__main__":
    main()
