"""Whatever a request brings is checked by type and value when it is submitted, and refused alone."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from irminsul_backend.engine.request_checks import MAX_END_IDS, MAX_NAME_BYTES, check_prompt, check_request
from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import MAX_WORD_BYTES, MAX_WORDS, SamplingParams

GOOD = GenerationRequest(key="k", namespace='["shared"]', end_ids=[1], bad_words=[[3, 4]], stop_words=["stop"])
HALF = "\ud800"


def test_a_good_request_passes() -> None:
    check_request(GOOD, 512)
    check_request(GenerationRequest.unpack(GOOD.pack()), 512)
    check_request(replace(GOOD, sampling=SamplingParams(temperature=1, seed=2**64 - 1)), 512)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", "3"),
        ("max_tokens", 2.5),
        ("max_tokens", True),
        ("max_tokens", None),
        ("max_tokens", 2**31),
        ("max_tokens", 10**400),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1),
        ("temperature", "1"),
        ("temperature", 10**400),
        ("temperature", [1.0]),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
    ],
)
def test_sampling_parameters(field: str, value: object) -> None:
    request = replace(GOOD, sampling=replace(SamplingParams(), **{field: value}))
    with pytest.raises(InvalidRequestError, match=f"^{field} is ") as caught:
        check_request(request, 512)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", 7),
        ("key", None),
        ("key", ""),
        ("key", "k" * (MAX_NAME_BYTES + 1)),
        ("key", HALF),
        ("namespace", {}),
        ("namespace", HALF),
        ("namespace", "ä" * MAX_NAME_BYTES),
        ("session_id", {}),
        ("session_id", 77),
        ("reuse", "always"),
        ("reuse", []),
        ("sampling", {}),
        ("stream", 1),
        ("return_log_probs", "yes"),
        ("echo", None),
        ("end_ids", 3),
        ("end_ids", "12"),
        ("end_ids", [-1]),
        ("end_ids", [1.0]),
        ("end_ids", [True]),
        ("end_ids", [0] * (MAX_END_IDS + 1)),
        ("bad_words", [3]),
        ("bad_words", [[512]]),
        ("bad_words", [["a"]]),
        ("stop_words", "stop"),
        ("stop_words", [1]),
        ("stop_words", [HALF]),
        ("stop_words", ["a"] * (MAX_WORDS + 1)),
        ("stop_words", ["a" * (MAX_WORD_BYTES + 1)]),
        ("timeout_ms", -1),
        ("timeout_ms", 1.5),
        ("priority", 11),
        ("priority", "high"),
    ],
)
def test_fields(field: str, value: object) -> None:
    with pytest.raises(InvalidRequestError, match=rf"^{field}(\[0\])? ") as caught:
        check_request(replace(GOOD, **{field: value}), 512)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (([1, 2], None, None), "token_ids is list"),
        ((np.array([1, 2]), None, None), r"token_ids is int64\[2\]; it must be one row of int32"),
        ((np.ones((1, 2), np.int32), None, None), r"token_ids is int32\[1, 2\]"),
        ((None, np.array([2.0]), None), "chunk_ends is float64"),
        ((None, None, np.zeros(1, np.int64)), "fingerprints is int64"),
        ((None, np.empty(0, np.int32), np.empty(0, np.uint64)), "0 chunk ends and 0 fingerprints do not describe 2"),
        ((None, np.array([0, 2], np.int32), np.zeros(2, np.uint64)), "do not describe"),
        ((None, np.array([-1, 2], np.int32), np.zeros(2, np.uint64)), "do not describe"),
        ((None, np.array([2, 2], np.int32), np.zeros(2, np.uint64)), "do not describe"),
    ],
)
def test_arrays(arrays: tuple, message: str) -> None:
    good = np.array([1, 2], np.int32), np.array([2], np.int32), np.zeros(1, np.uint64)
    check_prompt(*good, 512)
    with pytest.raises(InvalidRequestError, match=message):
        check_prompt(*(g if a is None else a for a, g in zip(arrays, good, strict=True)), 512)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"\xff", "not JSON"),
        (b"[]", "must be a JSON object"),
        (b"{}", "no key"),
        (b'{"key": "a", "sampling": 3}', "sampling is 3; it must be a JSON object"),
        (b'{"key": "a", "sampling": {"max_token": 3}}', "sampling has the unknown field 'max_token'"),
        (b'{"key": "a", "salt": 3}', "the request has the unknown field 'salt'"),
    ],
)
def test_a_packet_with_other_fields_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        GenerationRequest.unpack(data)


@pytest.mark.parametrize("sampling", [{"max_tokens": 0}, {"max_tokens": -5}, {"max_tokens": "3"}, {"max_tokens": 2.5}])
def test_a_packet_that_once_stopped_the_engine(harness, text, sampling: dict) -> None:
    """It is refused, and a stream beside it does not notice."""
    served = harness("one")
    running = served.submit(text(30), max_tokens=50)
    request = GenerationRequest.unpack(json.dumps({"key": "a", "sampling": sampling}).encode())
    with pytest.raises(InvalidRequestError, match="max_tokens is"):
        served.engine.submit(request, text(3), np.array([3], np.int32), np.zeros(1, np.uint64), lambda event: None)
    assert len(running.result().tokens) == 50
    counters = served.status()["counters"]
    assert counters["rejected_invalid"] == 1 and "cache_resets" not in counters
