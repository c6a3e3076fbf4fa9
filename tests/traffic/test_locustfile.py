"""The load test as it is run: Locust in its own process, against a real tritonserver and a small gRPC server."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

# Found, not imported: locust patches threads and sockets of the process that imports it.
pytestmark = pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="locust is not installed")

LOCUSTFILE = Path(__file__).resolve().parents[2] / "loadtest" / "locustfile.py"
USERS = 4


def run_locust(url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless", "--only-summary", "--host", url]
    command += ["--users", str(USERS), "--spawn-rate", "100", "--json", "--think-time", "0.01", *arguments]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=90)


def rows(result: subprocess.CompletedProcess[str]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(row["method"], row["name"]): row for row in json.loads(result.stdout)}


class Meeting(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers a request only when USERS requests are waiting at once, so that users who take turns get none."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(USERS)

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ModelReadyResponse(ready=True)

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            try:
                self.barrier.wait(timeout=10)
            except threading.BrokenBarrierError:
                yield service_pb2.ModelStreamInferResponse(error_message="nobody else came")
                return
            response = service_pb2.ModelInferResponse(id=request.id)
            response.parameters["triton_final_response"].bool_param = True
            usage = {"prompt_tokens": 10, "exact_tokens": 1, "shifted_tokens": 6, "computed_tokens": 3, "segments": 2}
            for name, text in (("text_output", "a"), ("finish_reason", "stop"), ("usage", json.dumps(usage))):
                response.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
                response.raw_output_contents.append(len(text).to_bytes(4, "little") + text.encode())
            response.outputs.add(name="output_ids", datatype="INT32", shape=[1, 2])
            response.raw_output_contents.append(bytes(8))
            yield service_pb2.ModelStreamInferResponse(infer_response=response)


@pytest.fixture
def meeting() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2 * USERS))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(Meeting(), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield address
    server.stop(grace=None).wait()


class TestLocustfile:
    def test_users_wait_for_the_server_at_the_same_time(self, meeting: str) -> None:
        result = run_locust(meeting, "--run-time", "1s")
        statistics = rows(result)
        turns = statistics["grpc", "turn"]
        assert turns["num_requests"] >= USERS
        # Users that the end of the run cut off leave the others waiting: these may fail, answered ones may not be few.
        assert turns["num_failures"] < USERS
        assert re.search(r"shifted .*60\.0%", result.stderr)
        answered = statistics["tokens", "exact"]["num_requests"]
        assert statistics["tokens", "shifted"]["total_response_time"] == 6 * answered
        assert statistics["time", "first token"]["num_requests"] == answered

    def test_without_a_server_it_quits_with_one_line(self) -> None:
        result = run_locust("127.0.0.1:1", "--run-time", "60s")
        assert result.returncode == 1
        assert "cannot reach an Irminsul server at 127.0.0.1:1" in result.stderr

    def test_a_missing_trace_quits_with_one_line(self, meeting: str) -> None:
        result = run_locust(meeting, "--run-time", "60s", "--trace", "none.jsonl")
        assert result.returncode == 1
        assert "none.jsonl cannot be read" in result.stderr

    @pytest.mark.server
    def test_against_a_real_server(self, server: Any) -> None:
        result = run_locust(server.grpc_url, "--run-time", "6s", "--max-tokens", "2")
        assert result.returncode == 0, result.stderr
        statistics = rows(result)
        assert statistics["grpc", "turn"]["num_failures"] == 0
        tokens = {
            source: statistics["tokens", source]["total_response_time"] for source in ("exact", "shifted", "computed")
        }
        assert tokens["shifted"] > tokens["computed"] > 0
