"""Shared by all tests: one real server for those that need one, and a way to call its models."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from tritonclient.grpc import InferenceServerClient, InferInput

from irminsul_backend.config import ServerConfig
from irminsul_backend.triton_io.sealing import SECRET_VARIABLE, new_secret, seal
from irminsul_backend.triton_io.server.launcher import Server, running_server
from irminsul_backend.triton_io.tensors import CONTROL_INPUT, REQUEST_INPUTS, SESSION_INPUTS, to_array

settings.register_profile("irminsul", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("irminsul")  # a busy machine is no failure

pytest_plugins = ["fake_ensemble", "interpreter_process", "one_layer_model"]

os.environ.setdefault(SECRET_VARIABLE, new_secret())
"""The servers that tests start take it too, so that tests can ask the engine as the server's own models do."""

SPECS = {spec.name: spec for spec in (*REQUEST_INPUTS, *SESSION_INPUTS, CONTROL_INPUT)}


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A real tritonserver with the shipped model, for all tests of the run."""
    with running_server(ServerConfig(log_level="WARNING", threads=1)) as running:
        yield running


def infer_inputs(fields: dict[str, Any]) -> list[InferInput]:
    """tritonclient's inputs from plain values."""
    inputs = []
    for name, value in fields.items():
        spec = SPECS[name]
        array = to_array(spec, value)
        tensor = InferInput(name, array.shape, "BYTES" if spec.dtype == "STRING" else spec.dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


@dataclass
class Answer:
    """All responses to one request."""

    id: str
    responses: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def joined(self, name: str) -> Any:
        """The texts joined, or the lists put behind each other."""
        parts = [response[name] for response in self.responses]
        return "".join(parts) if parts and isinstance(parts[0], str) else list(itertools.chain.from_iterable(parts))

    @property
    def text(self) -> str:
        return str(self.joined("text_output"))


class Stream:
    """A raw tritonclient stream, below the project's own client: flags, ids and inputs go as they are given."""

    def __init__(self, url: str) -> None:
        self._client = InferenceServerClient(url)
        self._results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._sent: dict[str, Answer] = {}
        self._answers: dict[str, Answer] = {}
        """Of requests whose last response has not come."""
        self._client.start_stream(lambda result, error: self._results.put((result, error)))

    def send(
        self,
        model: str = "irminsul",
        session: int | str | None = "",
        start: bool = True,
        end: bool = True,
        **inputs: Any,
    ) -> str:
        """Send a request; returns its id. Without a session it gets one of its own; None sends none at all."""
        request_id = uuid.uuid4().hex
        sequence: dict[str, Any] = {}
        if session is not None:
            name = f"one-shot-{request_id}" if session == "" else session
            sequence = {"sequence_id": name, "sequence_start": start, "sequence_end": end}
        self._sent[request_id] = self._answers[request_id] = Answer(request_id)
        self._client.async_stream_infer(
            model, infer_inputs(inputs), request_id=request_id, enable_empty_final_response=True, **sequence
        )
        return request_id

    def receive(self, timeout: float = 60) -> tuple[str, dict[str, Any]]:
        """(request id, outputs) of the next response.

        An error has no id: only a request that is alone on its stream may fail; it then has the id and no outputs.
        """
        result, error = self._results.get(timeout=timeout)
        if error is not None:
            (request_id,) = self._answers
            self._answers.pop(request_id).error = error.message()
            return request_id, {}
        response = result.get_response()
        outputs = {output.name: _plain(result.as_numpy(output.name)) for output in response.outputs}
        if outputs:
            self._answers[response.id].responses.append(outputs)
        if response.parameters["triton_final_response"].bool_param:
            self._answers.pop(response.id)
        return response.id, outputs

    def answers(self, ids: list[str], timeout: float = 60) -> list[Answer]:
        """Wait for all responses to these requests."""
        wanted = [self._sent[request_id] for request_id in ids]
        while any(request_id in self._answers for request_id in ids):
            self.receive(timeout)
        return wanted

    def refusals(self, ids: list[str], timeout: float = 60) -> list[str]:
        """Wait for the errors of these requests, all of which must fail and be the only ones that are open."""
        errors = [self._results.get(timeout=timeout)[1] for _ in ids]
        assert None not in errors
        self._answers.clear()
        return [error.message() for error in errors]

    def ask(self, timeout: float = 60, **request: Any) -> Answer:
        """Send one request and wait for all of its responses."""
        return self.answers([self.send(**request)], timeout)[0]

    def status(self) -> dict[str, Any]:
        """The engine's status."""
        packet = seal((CONTROL_INPUT,), {CONTROL_INPUT.name: '{"status": true}'})
        (response,) = self.ask(model="irminsul_engine", session=None, **packet).responses
        return dict(json.loads(response["event"]))

    def close(self, cancel: bool = False) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _plain(array: Any) -> Any:
    if array.dtype == object:
        return array.item().decode()
    return array[0].tolist()


@pytest.fixture(scope="session")
def make_inputs() -> Callable[[dict[str, Any]], list[InferInput]]:
    return infer_inputs


@pytest.fixture
def connect() -> Iterator[Callable[[Server], Stream]]:
    """Opens streams to a server and closes them after the test."""
    with contextlib.ExitStack() as streams:
        yield lambda server: streams.enter_context(Stream(server.grpc_url))


@pytest.fixture
def stream(server: Server, connect: Callable[[Server], Stream]) -> Stream:
    """One stream to the shared server."""
    return connect(server)
