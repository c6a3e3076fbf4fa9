"""Tensors, events and configurations: what one side of the border writes, the other reads."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.frontend.inputs import KNOWN
from irminsul_backend.protocol import Event, GenerationRequest, Usage
from irminsul_backend.request_spec import SamplingParams
from irminsul_backend.triton_io import tensors
from irminsul_backend.triton_io.events import Outgoing, hold_back, merge, pack_event, unpack_event
from irminsul_backend.triton_io.server.launcher import find_model_repository
from irminsul_backend.triton_io.tensors import TensorSpec, from_array, to_array

REPOSITORY = find_model_repository()
OPTIONAL_INPUTS = {
    "irminsul": tensors.REQUEST_INPUTS,
    "irminsul_chunker": (*tensors.REQUEST_INPUTS, *tensors.SESSION_INPUTS),
    "irminsul_engine": (*tensors.PLAN_TENSORS, tensors.CONTROL_INPUT),
    "irminsul_generate": (*tensors.REQUEST_INPUTS, *tensors.SESSION_INPUTS),
    "irminsul_unary": (*tensors.REQUEST_INPUTS, *tensors.SESSION_INPUTS),
}
OUTPUTS = {
    "irminsul": tensors.RESPONSE_OUTPUTS,
    "irminsul_chunker": tensors.PLAN_TENSORS,
    "irminsul_engine": tensors.EVENT_TENSORS,
    "irminsul_detokenizer": tensors.RESPONSE_OUTPUTS,
    "irminsul_generate": tensors.RESPONSE_OUTPUTS,
    "irminsul_unary": tensors.RESPONSE_OUTPUTS,
}


def configured(model: str, kind: str) -> dict[TensorSpec, bool]:
    """The tensors of one kind in a model's config.pbtxt, and whether each is optional."""
    text = (REPOSITORY / model / "config.pbtxt").read_text()
    block = re.search(rf"^{kind} \[\n(.*?)^\]", text, re.DOTALL | re.MULTILINE)
    assert block is not None
    pattern = r'name: "(\w+)", data_type: TYPE_(\w+), dims: \[ (-?\d+) \](, optional: true)?'
    return {TensorSpec(name, dtype, int(dims)): bool(opt) for name, dtype, dims, opt in re.findall(pattern, block[1])}


class TestConfigurations:
    @pytest.mark.parametrize("model", OPTIONAL_INPUTS)
    def test_optional_inputs(self, model: str) -> None:
        assert configured(model, "input") == dict.fromkeys(OPTIONAL_INPUTS[model], True)

    def test_the_detokenizer_needs_all_of_its_inputs(self) -> None:
        assert configured("irminsul_detokenizer", "input") == dict.fromkeys(tensors.EVENT_TENSORS, False)

    @pytest.mark.parametrize("model", OUTPUTS)
    def test_outputs(self, model: str) -> None:
        assert configured(model, "output") == dict.fromkeys(OUTPUTS[model], False)

    def test_the_chunker_knows_every_input(self) -> None:
        assert {spec.name for spec in tensors.REQUEST_INPUTS} == KNOWN.keys()

    def test_no_model_waits_for_a_slot_of_tritons_sequence_batcher(self) -> None:
        for config in REPOSITORY.glob("*/config.pbtxt"):
            assert "sequence_batching" not in config.read_text()

    def test_every_model_file_is_thin(self) -> None:
        files = list(Path(REPOSITORY).glob("*/1/model.py"))
        assert len(files) == 4
        assert all(len(file.read_text().splitlines()) < 100 for file in files)


class TestTensors:
    @pytest.mark.parametrize(
        ("spec", "value", "expected"),
        [
            (TensorSpec("a", "STRING"), "α", "α".encode()),
            (TensorSpec("a", "STRING", -1), ["x", b"\xff"], [b"x", b"\xff"]),
            (TensorSpec("a", "STRING", -1), [], []),
            (TensorSpec("a", "UINT64"), 2**64 - 1, 2**64 - 1),
            (TensorSpec("a", "BOOL"), True, True),
            (TensorSpec("a", "FP32"), 0.5, 0.5),
        ],
    )
    def test_there_and_back(self, spec: TensorSpec, value: object, expected: object) -> None:
        back = from_array(spec, to_array(spec, value))
        assert back == expected
        assert type(back) is type(expected)

    def test_rows_of_numbers_stay_arrays(self) -> None:
        spec = TensorSpec("a", "INT32", -1)
        for ids in ([], [1, 2, 3]):
            back = from_array(spec, to_array(spec, ids))
            assert back.dtype == np.int32
            assert back.tolist() == ids

    @pytest.mark.parametrize("shape", [(2, 1), (3,), (0, 1)])
    def test_a_batch_is_refused_with_its_shape(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(InvalidRequestError, match=re.escape(str(list(shape)))):
            from_array(TensorSpec("max_tokens", "INT32"), np.zeros(shape, np.int32))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2), st.booleans()), max_size=40))
def test_merging_keeps_the_tokens_and_order_of_every_request(script: list[tuple[int, int, bool]]) -> None:
    requests = [Outgoing(None) for _ in range(4)]
    batch = [(out, Event(f"{n}", 0, "admitted")) for n, out in enumerate(requests)]
    for n, count, is_progress in script:
        first = len(batch)
        ids = list(range(first, first + count))
        event = (
            Event(f"{n}", 0, "progress") if is_progress else Event(f"{n}", 0, "tokens", ids, [float(i) for i in ids])
        )
        batch.append((requests[n], event))
    batch += [(out, Event(f"{n}", 0, "finished", [n])) for n, out in enumerate(requests)]
    merged = merge(batch)
    for n, out in enumerate(requests):
        before, after = ([event for owner, event in events if owner is out] for events in (batch, merged))
        assert all(event.key == f"{n}" for event in after)
        assert [i for event in after for i in event.token_ids] == [i for event in before for i in event.token_ids]
        assert [p for event in after for p in event.log_probs] == [p for event in before for p in event.log_probs]
        assert [e.kind for e in after if e.kind != "tokens"] == [e.kind for e in before if e.kind != "tokens"]
        pairs = itertools.pairwise(event.kind for event in after)
        assert not any(a == "tokens" and b in ("tokens", "finished") for a, b in pairs)


@given(
    key=st.text(min_size=1),
    ids=st.lists(st.integers(0, 2**31 - 1)),
    echo=st.text(),
    stop_words=st.lists(st.text()),
    seed=st.none() | st.integers(0, 2**64 - 1),
    error=st.text(),
)
def test_events_arrive_as_they_were_sent(
    key: str, ids: list[int], echo: str, stop_words: list[str], seed: int | None, error: str
) -> None:
    request = GenerationRequest(key, sampling=SamplingParams(seed=seed), stop_words=stop_words, echo=echo)
    usage = Usage(9, 1, 2, 6, 1, [[1, 2, -3]], 4, 0.5, 1.5)
    event = Event(key, 3, "tokens", ids, [-0.5] * len(ids), "stop", request, usage, 7, error)
    back = unpack_event(pack_event(event), event.token_ids, event.log_probs)
    assert back.request is not None
    assert back.request.pack() == request.pack()
    assert {**vars(back), "request": None} == {**vars(event), "request": None}


def test_tokens_wait_until_they_are_due_and_nothing_overtakes_them() -> None:
    early, due = Outgoing(None, due=5.0), Outgoing(None, due=1.0)
    tokens = [Event("a", 3, "tokens", (7,)), Event("b", 3, "tokens", (8,))]
    batch = [(early, tokens[0]), (due, tokens[1])]
    assert hold_back(batch, 2.0) == ([(due, tokens[1])], [(early, tokens[0])])
    assert hold_back(batch, float("inf")) == (batch, [])
    error = (early, Event("a", 4, "error", error="lost"))
    send, keep = hold_back([*batch, error], 2.0)
    assert keep == [] and send == [*batch, error], "an error must not come before the tokens that were held"
    first = (Outgoing(None), Event("c", 1, "tokens", (9,)))
    assert hold_back([first], 0.0) == ([first], []), "the first token never waits"
