"""Clients of every kind at once: whole answers, streams, some broken off, some that ask for a part of the outputs."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput
from tritonclient.utils import InferenceServerException

from irminsul_backend.triton_io.server.launcher import Server

Client = Callable[[Server, random.Random], None]
TIMEOUT_S = 60


def whole_answers(server: Server, draw: random.Random) -> None:
    """Two turns of a session, one token each."""
    ids, name = [draw.randrange(20, 290) for _ in range(150)], f"s{draw.random()}"
    with httpx.Client(base_url=server.http_url, timeout=TIMEOUT_S) as http:
        for tail in ([], [draw.randrange(20, 290) for _ in range(5)]):
            body = {"input_ids": ids + tail, "max_tokens": 1, "cache_salt": name, "session_id": name}
            assert http.post("/v2/models/irminsul_unary/generate", json=body).status_code == 200


def impatient_answers(server: Server, draw: random.Random) -> None:
    """The client goes away before the answer."""
    body = {"text_input": "x " * draw.randrange(1, 200), "max_tokens": 200, "ignore_eos": True}
    model = draw.choice(("irminsul_unary", "irminsul_generate"))
    with contextlib.suppress(httpx.TimeoutException), httpx.Client(base_url=server.http_url) as http:
        http.post(f"/v2/models/{model}/generate", json=body, timeout=draw.choice((0.002, 0.02, 0.1)))


def broken_streams(server: Server, draw: random.Random) -> None:
    """The client leaves after some tokens."""
    body = {"text_input": "y " * draw.randrange(1, 50), "max_tokens": 60, "ignore_eos": True, "stream": True}
    path = "/v2/models/irminsul_generate/generate_stream"
    with (
        httpx.Client(base_url=server.http_url, timeout=TIMEOUT_S) as http,
        http.stream("POST", path, json=body) as response,
    ):
        for i, _ in enumerate(response.iter_lines()):
            if i == draw.randrange(8):
                return


def partial_outputs(server: Server, draw: random.Random) -> None:
    """Each model is asked for one of its outputs: Triton drops the others while it sends."""
    text = _tensor("text_input", "BYTES", [b"z " * draw.randrange(1, 50)])
    with InferenceServerClient(server.grpc_url) as client:
        client.infer("irminsul_unary", [text], outputs=[InferRequestedOutput("text_output")], client_timeout=TIMEOUT_S)
        results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        client.start_stream(lambda result, error: results.put((result, error)))
        stop_words = _tensor("stop_words", "BYTES", [b"a", b"e"])
        for model, output in (("irminsul", "text_output"), ("irminsul_chunker", "request")):
            client.async_stream_infer(
                model,
                [text, stop_words, _tensor("stream", "BOOL", [True])],
                outputs=[InferRequestedOutput(output)],
                enable_empty_final_response=True,
            )
            final = False
            while not final:
                result, error = results.get(timeout=TIMEOUT_S)
                assert error is None, error
                final = result.get_response().parameters["triton_final_response"].bool_param
        client.stop_stream()


def refused_requests(server: Server, draw: random.Random) -> None:
    """Wrong values, and packets that only the server's own models may send."""
    with InferenceServerClient(server.grpc_url) as client, contextlib.suppress(InferenceServerException):
        client.infer("irminsul_unary", [_tensor("text_input", "BYTES", [b""])], client_timeout=TIMEOUT_S)
    with httpx.Client(base_url=server.http_url, timeout=TIMEOUT_S) as http:
        answer = http.post("/v2/models/irminsul_engine/generate", json={"control": '{"status": true}'})
        assert "does not come from this server" in answer.text


CLIENTS: tuple[Client, ...] = (whole_answers, impatient_answers, broken_streams, partial_outputs, refused_requests)


def _tensor(name: str, datatype: str, values: list[Any]) -> InferInput:
    types = {"BYTES": np.object_, "BOOL": np.bool_}
    tensor = InferInput(name, [1, len(values)], datatype)
    tensor.set_data_from_numpy(np.array([values], dtype=types[datatype]))
    return tensor


def run(server: Server, clients: tuple[Client, ...], seconds: float, seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Let the clients, a thread each, work for some time. Returns how often each did, and the first failures."""
    counts: Counter[str] = Counter()
    failures: list[str] = []
    end = time.monotonic() + seconds

    def work(number: int, client: Client) -> None:
        draw = random.Random(seed * 1000 + number)
        while time.monotonic() < end and not failures:
            try:
                client(server, draw)
                counts[client.__name__] += 1
            except Exception as error:
                failures.append(f"{client.__name__}: {error!r}")

    threads = [threading.Thread(target=work, args=item) for item in enumerate(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts, failures
