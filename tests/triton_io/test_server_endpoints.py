"""`irminsul_unary` and `irminsul_generate` on a real server, over HTTP and unary gRPC."""

from __future__ import annotations

import json
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http
from tritonclient.grpc import InferenceServerClient
from tritonclient.utils import InferenceServerException

from irminsul_backend.triton_io.server.launcher import Server

pytestmark = pytest.mark.server

REQUEST = {"text_input": "An agent asks over HTTP", "max_tokens": 6, "ignore_eos": True}
ENDPOINTS = ("irminsul_unary", "irminsul_generate")


@pytest.fixture
def http(server: Server) -> Any:
    with httpx.Client(base_url=f"{server.http_url}/v2/models", timeout=60) as client:
        yield client


@pytest.fixture
def expected(stream: Any) -> list[int]:
    """What the ensemble itself answers to REQUEST."""
    return list(stream.ask(**REQUEST).joined("output_ids"))


def events(response: httpx.Response) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data:")) for line in response.iter_lines() if line]


class TestGenerate:
    @pytest.mark.parametrize("model", ENDPOINTS)
    def test_one_answer(self, model: str, http: httpx.Client, expected: list[int]) -> None:
        answer = http.post(f"/{model}/generate", json=REQUEST).json()
        assert answer["output_ids"] == expected
        assert answer["finish_reason"] == "length"
        assert json.loads(answer["usage"])["completion_tokens"] == 6

    def test_a_stream(self, http: httpx.Client, expected: list[int]) -> None:
        with http.stream("POST", "/irminsul_generate/generate_stream", json={**REQUEST, "stream": True}) as response:
            parts = events(response)
        assert [part["index"] for part in parts] == list(range(len(parts)))
        assert sum(part["num_output_tokens"] for part in parts) == 6
        assert [i for part in parts for i in np.atleast_1d(part["output_ids"]).tolist()] == expected
        assert [part["finish_reason"] for part in parts] == [""] * (len(parts) - 1) + ["length"]

    @pytest.mark.parametrize("model", ENDPOINTS)
    def test_lists_and_every_type_of_input(self, model: str, http: httpx.Client) -> None:
        request = {
            "input_ids": [5, 6, 7, 8],
            "max_tokens": 3,
            "stop_words": ["never", "said"],
            "temperature": 0.7,
            "top_k": 40,
            "seed": 2**63 + 5,
            "return_log_probs": True,
            "cache_salt": "tenant",
        }
        answers = [http.post(f"/{model}/generate", json=request).json() for _ in range(2)]
        assert answers[0]["output_ids"] == answers[1]["output_ids"]
        assert len(answers[0]["output_log_probs"]) == len(answers[0]["output_ids"])

    @pytest.mark.parametrize("model", ENDPOINTS)
    def test_an_error_has_its_own_words(self, model: str, http: httpx.Client) -> None:
        response = http.post(f"/{model}/generate", json={"text_input": "a", "temperature": -1.0})
        assert response.status_code == 400
        assert response.json()["error"].removeprefix(f"in ensemble '{model}', ").startswith("temperature is -1.0")


class TestInfer:
    def test_unary_grpc(self, server: Server, make_inputs: Any, expected: list[int]) -> None:
        with InferenceServerClient(server.grpc_url) as client:
            result = client.infer("irminsul_unary", make_inputs(REQUEST))
        assert result.as_numpy("output_ids").tolist() == [expected]

    def test_http(self, server: Server, expected: list[int]) -> None:
        client = tritonclient.http.InferenceServerClient(server.http_url.removeprefix("http://"))
        inputs = []
        for name, kind, value in (
            ("text_input", "BYTES", REQUEST["text_input"]),
            ("max_tokens", "INT32", REQUEST["max_tokens"]),
            ("ignore_eos", "BOOL", True),
            ("session_id", "BYTES", "http-infer"),
            ("session_end", "BOOL", True),
        ):
            tensor = tritonclient.http.InferInput(name, [1, 1], kind)
            types = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}
            tensor.set_data_from_numpy(np.array([[value]], dtype=types[kind]))
            inputs.append(tensor)
        result = client.infer("irminsul_unary", inputs)
        assert result.as_numpy("output_ids").tolist() == [expected]
        client.close()


class TestSessions:
    @pytest.mark.parametrize("model", ENDPOINTS)
    def test_a_session_opens_by_itself_and_ends_when_told(self, model: str, http: httpx.Client, stream: Any) -> None:
        session = f"http-{uuid.uuid4()}"
        for _ in range(2):
            assert http.post(f"/{model}/generate", json={**REQUEST, "session_id": session}).status_code == 200
        assert "already open" in stream.ask(session=session, start=True, end=False, **REQUEST).error
        last = http.post(f"/{model}/generate", json={**REQUEST, "session_id": session, "session_end": True})
        assert last.status_code == 200
        assert "START" in stream.ask(session=session, start=False, end=False, **REQUEST).error

    @pytest.mark.parametrize("model", ENDPOINTS)
    def test_a_session_opened_or_ended_elsewhere(self, model: str, http: httpx.Client, stream: Any) -> None:
        session = f"elsewhere-{uuid.uuid4()}"
        assert not stream.ask(session=session, start=True, end=False, **REQUEST).error
        assert http.post(f"/{model}/generate", json={**REQUEST, "session_id": session}).status_code == 200
        assert not stream.ask(session=session, start=False, end=True, **REQUEST).error
        assert http.post(f"/{model}/generate", json={**REQUEST, "session_id": session}).status_code == 200

    def test_first_requests_of_one_session_at_once(self, http: httpx.Client, expected: list[int]) -> None:
        session = f"at-once-{uuid.uuid4()}"

        def ask(number: int) -> list[int]:
            model = ENDPOINTS[number % 2]
            return list(http.post(f"/{model}/generate", json={**REQUEST, "session_id": session}).json()["output_ids"])

        with ThreadPoolExecutor(16) as threads:
            assert list(threads.map(ask, range(16))) == [expected] * 16

    @pytest.mark.parametrize(("session", "word"), [("", "empty"), ("x" * 129, "128")])
    def test_a_bad_session_id(self, session: str, word: str, http: httpx.Client) -> None:
        response = http.post("/irminsul_unary/generate", json={**REQUEST, "session_id": session})
        assert response.status_code == 400
        assert word in response.json()["error"]


class TestManyAtOnce:
    def test_each_gets_its_own_answer_and_none_waits_for_another(self, http: httpx.Client, stream: Any) -> None:
        def request(number: int) -> dict[str, Any]:
            return {"text_input": f"question {number} of many", "max_tokens": 8, "ignore_eos": True, "reuse": "off"}

        def ask(number: int) -> list[int]:
            return list(http.post(f"/{ENDPOINTS[number % 2]}/generate", json=request(number)).json()["output_ids"])

        alone = [stream.ask(**request(number)).joined("output_ids") for number in range(32)]
        with ThreadPoolExecutor(32) as threads:
            assert list(threads.map(ask, range(32))) == alone

    def test_a_client_that_leaves_its_stream_stops_the_engine(self, http: httpx.Client, stream: Any) -> None:
        before = stream.status()["counters"].get("finished_cancelled", 0)
        body = {**REQUEST, "max_tokens": 3000, "stream": True}
        with http.stream("POST", "/irminsul_generate/generate_stream", json=body) as response:
            next(response.iter_lines())
        while (now := stream.status())["running"]:
            time.sleep(0.01)
        assert now["counters"]["finished_cancelled"] == before + 1

    def test_a_client_that_does_not_wait_for_its_answer_stops_the_engine(
        self, server: Server, make_inputs: Any, stream: Any
    ) -> None:
        """Over gRPC. Triton's HTTP server reads nothing from a connection before the first response is there."""
        before = stream.status()["counters"].get("finished_cancelled", 0)
        with InferenceServerClient(server.grpc_url) as client, pytest.raises(InferenceServerException):
            client.infer("irminsul_unary", make_inputs({**REQUEST, "max_tokens": 3000}), client_timeout=0.5)
        while (now := stream.status())["running"]:
            time.sleep(0.01)
        assert now["counters"]["finished_cancelled"] == before + 1
