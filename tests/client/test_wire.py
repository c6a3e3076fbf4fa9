"""Requests to tensors and responses back: every name, datatype and shape of the tensor contract."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from irminsul_client import InvalidRequest, ServerError, Usage
from irminsul_client._grpc import decode_response, encode_request, encode_tensor
from irminsul_client._inputs import TENSORS
from irminsul_client._request import build_fields
from irminsul_client._transport import Request
from irminsul_client._types import chunk_from_outputs
from tritonclient.grpc import InferInput, service_pb2


def reference(name: str, datatype: str, array: np.ndarray) -> bytes:
    """The bytes that tritonclient itself sends for an array."""
    tensor = InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array)
    content: bytes = tensor._get_content()
    return content


class TestEncode:
    @given(st.lists(st.text(st.characters(codec="utf-8")), max_size=5))
    def test_texts_equal_tritonclients(self, texts: list[str]) -> None:
        array = np.array([[t.encode() for t in texts]], dtype=np.object_).reshape(1, len(texts))
        datatype, shape, raw = encode_tensor("stop_words", texts)
        assert (datatype, shape) == ("BYTES", [1, len(texts)])
        assert raw == reference("stop_words", "BYTES", array)

    @given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20))
    def test_ids_equal_tritonclients(self, ids: list[int]) -> None:
        datatype, shape, raw = encode_tensor("input_ids", ids)
        assert (datatype, shape) == ("INT32", [1, len(ids)])
        assert raw == reference("input_ids", "INT32", np.array([ids], np.int32).reshape(1, len(ids)))

    @pytest.mark.parametrize("value", [0, 2**63, 2**64 - 1])
    def test_seeds_use_all_64_bits(self, value: int) -> None:
        assert encode_tensor("seed", value) == ("UINT64", [1, 1], value.to_bytes(8, "little"))

    @pytest.mark.parametrize(
        ("name", "value"),
        [("max_tokens", 2**31), ("max_tokens", 1.5), ("seed", -1), ("seed", 2**64), ("input_ids", [1, -(2**31) - 1])],
    )
    def test_values_that_do_not_fit_are_named(self, name: str, value: Any) -> None:
        with pytest.raises(InvalidRequest, match=name):
            encode_tensor(name, value)

    @pytest.mark.parametrize(("name", "value"), [("reuse", 3), ("text_input", True), ("cache_salt", [1, 2])])
    def test_a_text_is_no_number(self, name: str, value: Any) -> None:
        with pytest.raises(InvalidRequest, match=f"{name} is .*only text, not"):
            encode_tensor(name, value)

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
    def test_bad_numbers_are_left_to_the_server(self, value: float) -> None:
        raw = encode_tensor("temperature", value)[2]
        np.testing.assert_array_equal(np.frombuffer(raw, "<f4"), np.float32([value]))

    def test_whole_request(self) -> None:
        fields = build_fields({"messages": [{"role": "user", "content": "α"}], "ignore_eos": True}, stream=True)
        message = encode_request("irminsul", Request(fields, "18446744073709551616", True, False, id="r1"))
        assert message.parameters["sequence_id"].string_param == "18446744073709551616"
        assert message.parameters["sequence_start"].bool_param
        assert not message.parameters["sequence_end"].bool_param
        sent = {t.name: raw for t, raw in zip(message.inputs, message.raw_input_contents, strict=True)}
        assert json.loads(sent["messages"][4:]) == [{"role": "user", "content": "α"}]
        assert sent["ignore_eos"] == sent["stream"] == b"\x01"

    def test_a_lone_surrogate_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="session id"):
            encode_request("irminsul", Request({}, "\ud800", True, False, id="r1"))
        with pytest.raises(InvalidRequest, match="text_input"):
            encode_request("irminsul", Request({"text_input": "\ud800"}, "s", True, False, id="r1"))


class TestFields:
    def test_each_option_has_its_tensor(self) -> None:
        options = {"text": "p", "tools": [{"name": "f"}], "max_tokens": 3, "reuse": "exact", "cache_salt": "s"}
        options |= {"temperature": 0.5, "top_k": 2, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.1}
        options |= {
            "presence_penalty": 0.1,
            "frequency_penalty": 0.2,
            "seed": 7,
            "stop_words": ["x"],
            "bad_words": ["y"],
        }
        options |= {"end_id": 1, "ignore_eos": False, "return_log_probs": True, "echo": True}
        fields = build_fields(options, stream=False)
        assert fields.pop("text_input") == "p"
        assert fields.pop("exclude_input_in_output") is False
        assert fields.pop("stream") is False
        assert json.loads(fields.pop("tools")) == [{"name": "f"}]
        assert fields == {k: v for k, v in options.items() if k not in ("text", "tools", "echo")}
        assert fields.keys() <= TENSORS.keys()

    def test_none_and_empty_lists_are_not_sent(self) -> None:
        assert build_fields({"text": "", "seed": None, "stop_words": []}, stream=True) == {
            "text_input": "",
            "stream": True,
        }

    def test_an_empty_id_list_is_a_prompt(self) -> None:
        assert build_fields({"input_ids": []}, stream=True)["input_ids"] == []

    @pytest.mark.parametrize("name", ["stop_words", "bad_words"])
    @pytest.mark.parametrize("value", ["abc", "", b"abc", 3, ["a", 3]])
    def test_a_list_of_texts_is_no_text(self, name: str, value: Any) -> None:
        with pytest.raises(InvalidRequest, match=f"{name} must be a list of texts; it is ") as caught:
            build_fields({"text": "x", name: value}, stream=True)
        assert repr(value) in str(caught.value)

    @pytest.mark.parametrize("value", ["12", 5])
    def test_ids_are_a_list(self, value: Any) -> None:
        with pytest.raises(InvalidRequest, match="input_ids must be a list of whole numbers; it is "):
            build_fields({"input_ids": value}, stream=True)

    def test_messages_that_are_no_json(self) -> None:
        with pytest.raises(InvalidRequest, match="messages"):
            build_fields({"messages": [{"role": object()}]}, stream=True)


class TestDecode:
    def test_every_kind_of_output(self) -> None:
        message = service_pb2.ModelInferResponse()
        for name, datatype, shape, raw in (
            ("text_output", "BYTES", [1, 1], b"\x02\x00\x00\x00\xce\xb1"),
            ("output_ids", "INT32", [1, 2], np.int32([5, -1]).tobytes()),
            ("output_log_probs", "FP32", [1, 2], np.float32([-0.5, -1]).tobytes()),
            ("index", "INT32", [1, 1], np.int32([4]).tobytes()),
            ("finish_reason", "BYTES", [1, 1], bytes(4)),
        ):
            message.outputs.add(name=name, datatype=datatype, shape=shape)
            message.raw_output_contents.append(raw)
        message.parameters["triton_final_response"].bool_param = True
        response = decode_response(message)
        assert response.final
        chunk = chunk_from_outputs(response.outputs)
        assert chunk is not None
        assert (chunk.text, chunk.token_ids, chunk.log_probs, chunk.index) == ("α", (5, -1), (-0.5, -1.0), 4)

    def test_progress_is_no_chunk(self) -> None:
        assert chunk_from_outputs({"text_output": "", "output_ids": [], "index": [3], "finish_reason": ""}) is None
        assert chunk_from_outputs({}) is None

    def test_generate_endpoints_flatten_lists_of_one(self) -> None:
        chunk = chunk_from_outputs({"text_output": "a", "output_ids": 0, "output_log_probs": -0.25, "index": 3})
        assert chunk is not None
        assert (chunk.token_ids, chunk.log_probs, chunk.index) == ((0,), (-0.25,), 3)

    @pytest.mark.parametrize("text", ["{", "[1]", "{}", '{"prompt_tokens": 1, "segment_map": [[1]]}', "null"])
    def test_broken_usage_is_a_server_error(self, text: str) -> None:
        with pytest.raises(ServerError, match="usage"):
            Usage.from_json(text)
