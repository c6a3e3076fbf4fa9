"""Bad input on a real server: a clear error for that request alone, while a good request runs and stays right."""

from __future__ import annotations

import json
import queue
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

from irminsul_backend.protocol import Event, GenerationRequest
from irminsul_backend.triton_io.events import pack_event
from irminsul_backend.triton_io.server.launcher import Server
from irminsul_backend.triton_io.tensors import EVENT_TENSORS, NUMPY, PLAN_TENSORS

pytestmark = pytest.mark.server

MESSAGES = json.dumps([{"role": "user", "content": "hello"}])
BAD = {
    "empty prompt": ({"text_input": ""}, ["empty"]),
    "no prompt": ({"max_tokens": 3}, ["text_input", "messages", "input_ids"]),
    "empty input_ids": ({"input_ids": np.zeros(0, np.int32)}, ["empty"]),
    "two prompts": ({"text_input": "a", "messages": MESSAGES}, ["exactly one"]),
    "over the limit": ({"text_input": "a b c", "max_tokens": 10**6}, ["max_tokens is 1000000", "limit"]),
    "max_tokens of 0": ({"text_input": "a", "max_tokens": 0}, ["max_tokens is 0"]),
    "negative temperature": ({"text_input": "a", "temperature": -0.5}, ["temperature is -0.5"]),
    "temperature not a number": ({"text_input": "a", "temperature": float("nan")}, ["temperature is nan"]),
    "infinite top_p": ({"text_input": "a", "top_p": float("inf")}, ["top_p is inf"]),
    "negative top_k": ({"text_input": "a", "top_k": -1}, ["top_k is -1"]),
    "penalty of 0": ({"text_input": "a", "repetition_penalty": 0.0}, ["repetition_penalty is 0.0"]),
    "infinite penalty": ({"text_input": "a", "presence_penalty": float("-inf")}, ["presence_penalty is -inf"]),
    "unknown reuse mode": ({"text_input": "a", "reuse": "sometimes"}, ["reuse is 'sometimes'", "content"]),
    "messages no JSON": ({"messages": "[{"}, ["messages", "JSON"]),
    "messages no list": ({"messages": '{"role": "user"}'}, ["messages", "list"]),
    "tools no JSON": ({"messages": MESSAGES, "tools": "nonsense"}, ["tools", "JSON"]),
    "id out of the vocabulary": ({"input_ids": np.array([5, 10**6], np.int32)}, ["input_ids[1] is 1000000"]),
    "negative id": ({"input_ids": np.array([-1], np.int32)}, ["input_ids[0] is -1"]),
    "text not UTF-8": ({"text_input": b"ab\xff"}, ["UTF-8"]),
    "stop word not UTF-8": ({"text_input": "a", "stop_words": [b"\xff"]}, ["UTF-8", "stop_words"]),
    "10 MB of text": ({"text_input": "x" * 10_000_000}, ["10000000 bytes", "4194304"]),
    "10 MB of a choice": ({"text_input": "a", "reuse": "z" * 10_000_000}, ["reuse is 'zzz", "10000000 characters"]),
    "a long salt": ({"text_input": "a", "cache_salt": "y" * 257}, ["cache_salt is 257 bytes", "at most 256"]),
    "a long key": ({"text_input": "a", "cancel_key": "y" * 129}, ["cancel_key is 129 bytes", "at most 128"]),
    "a long text": ({"text_input": "word " * 800_000}, ["at least", "tokens", "65536"]),
    "session id over 128 bytes": ({"text_input": "a", "session": "y" * 129}, ["128"]),
}
GOOD = {"text_input": "a good request that keeps running", "max_tokens": 60, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def cached() -> list[int]:
    return []


@pytest.fixture
def expected(cached: list[int], stream: Any) -> list[int]:
    """The token ids of the good request when it runs alone."""
    cached[:] = cached or stream.ask(**GOOD).joined("output_ids")
    return cached


@pytest.mark.parametrize(("request_fields", "words"), BAD.values(), ids=BAD.keys())
def test_the_error_is_clear_and_a_good_request_stays_right(
    request_fields: dict[str, Any],
    words: list[str],
    expected: list[int],
    server: Server,
    stream: Any,
    connect: Callable[[Server], Any],
) -> None:
    other = connect(server)
    running = stream.send(**GOOD)
    error = other.ask(**request_fields).error
    for word in words:
        assert word in error
    (good,) = stream.answers([running])
    assert good.joined("output_ids") == expected
    assert not other.ask(text_input="and the stream still works", max_tokens=1).error


def test_a_batch_of_two_is_refused(server: Server, make_inputs: Any) -> None:
    tensor = InferInput("text_input", [2, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"one"], [b"two"]], dtype=np.object_))
    with InferenceServerClient(server.grpc_url) as client, pytest.raises(InferenceServerException) as caught:
        client.infer("irminsul_unary", [tensor])
    assert "one request at a time" in str(caught.value)


@pytest.mark.parametrize("control", ['{"status": true}', '{"stop": "a"}', "x" * 16 + '{"stop": "a"}', ""])
def test_the_engine_takes_orders_from_its_own_models_only(control: str, stream: Any) -> None:
    assert (
        "control does not come from this server"
        in stream.ask(model="irminsul_engine", session=None, control=control).error
    )


@pytest.mark.parametrize("model", ["irminsul_engine", "irminsul_detokenizer"])
def test_a_packet_that_a_client_made_up_is_refused(model: str, server: Server) -> None:
    """Also one that another server sealed, or that names another namespace than it was sealed for."""
    request = GenerationRequest("made-up", namespace='["salt", "another tenant"]')
    plan = {
        "token_ids": [[5, 6]],
        "chunk_ends": [[2]],
        "fingerprints": [[7]],
        "request": [[b"0" * 16 + request.pack()]],
    }
    event = Event("made-up", 0, "admitted", request=request)
    events = {"output_ids": [[1]], "output_log_probs": [[]], "event": [[b"0" * 16 + pack_event(event)]]}
    specs, values = (PLAN_TENSORS, plan) if model == "irminsul_engine" else (EVENT_TENSORS, events)
    inputs = []
    for spec in specs:
        array = np.array(values[spec.name], NUMPY[spec.dtype])
        tensor = InferInput(spec.name, list(array.shape), "BYTES" if spec.dtype == "STRING" else spec.dtype)
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: results.put(error))
        client.async_stream_infer(model, inputs)
        assert "does not come from this server" in str(results.get(timeout=10))


def test_a_special_token_in_a_message_is_text_unless_allowed(stream: Any) -> None:
    """As text it takes more tokens than the one that it is when it is allowed."""
    messages = json.dumps([{"role": "user", "content": "a<|user|>b"}])

    def tokens(**inputs: Any) -> int:
        answer = stream.ask(messages=messages, max_tokens=1, **inputs)
        return int(json.loads(answer.responses[-1]["usage"])["prompt_tokens"])

    assert tokens() == tokens(allow_special_tokens=False) > tokens(allow_special_tokens=True)
