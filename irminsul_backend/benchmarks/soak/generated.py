"""Seeded malformed requests: wrong types, shapes, ranges and encodings, huge values, cut packets, random bytes.

Left out is what is known to end Triton 2.51 by itself, whatever model it serves (see KNOWN).
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import grpc
from tritonclient.grpc import service_pb2

from irminsul_backend.benchmarks.soak.wire import Http, Wire
from irminsul_backend.request_spec import INPUTS

KNOWN = {
    "HTTP /infer whose JSON shape is [1099511627776, 1]": "std::bad_alloc",
    "a refused gRPC stream with the header triton_grpc_error: true": "abort",
}
"""Triton 2.51's own deaths, with what it says."""
MODELS = (
    "irminsul",
    "irminsul_chunker",
    "irminsul_engine",
    "irminsul_detokenizer",
    "irminsul_generate",
    "irminsul_unary",
)
NAMES = [spec.name for spec in INPUTS]
INNER = ["token_ids", "chunk_ends", "fingerprints", "request", "control", "output_ids", "output_log_probs", "event"]
TYPES = ["BYTES", "INT32", "UINT64", "FP32", "BOOL", "INT64", "FP64", "UINT8", "FP16", "", "NONSENSE"]
TEXTS = [
    "",
    "\0",
    "\ud800",
    "x" * 5000,
    "﷽" * 300,
    "{}",
    "[]",
    "null",
    '[{"role": "user"}]',
    '[{"role": 5, "content": {}}]',
    '{"key": "k", "sampling": {"max_tokens": 0}}',
    '{"key": {}, "index": [], "kind": "tokens"}',
    '{"key": "k", "index": 0, "kind": "admitted", "request": "{}"}',
    '{"stop": {}}',
    '{"status": [1]}',
    "[" * 3000,
    "<|user|>" * 40,
]
NUMBERS: list[Any] = [
    0,
    -1,
    1,
    2**31 - 1,
    -(2**31),
    2**31,
    2**63,
    2**64 - 1,
    2**64,
    10**40,
    0.5,
    -0.0,
    1e38,
    1e-45,
    1e400,
]
ODD: list[Any] = [
    None,
    True,
    [],
    {},
    [[]],
    {"a": 1},
    [None],
    ["a", 1],
    [1, "a"],
    [[1], [2]],
    "7",
    float("nan"),
    *NUMBERS,
]


class Malformed(NamedTuple):
    """One request: `way` is http, unary, stream or raw (gRPC bytes without a message's form)."""

    kind: str
    way: str
    path: str
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()


def generate(rng: random.Random) -> Malformed:
    return rng.choice(KINDS)(rng)


def send(request: Malformed, http: Http, wire: Wire, timeout: float = 15) -> tuple[str, str]:
    """(served, refused, cut or hung; what was said)."""
    if request.way == "http":
        status, text = http.post(request.path, request.body, dict(request.headers))
        return {0: "hung", -1: "cut", 200: "served"}.get(status, "refused"), text
    return _over_grpc(request, wire, timeout)


def _over_grpc(request: Malformed, wire: Wire, timeout: float) -> tuple[str, str]:
    try:
        if request.way == "stream":
            call = wire.channel.stream_stream(
                "/inference.GRPCInferenceService/ModelStreamInfer",
                request_serializer=None,
                response_deserializer=service_pb2.ModelStreamInferResponse.FromString,
            )
            errors = [response.error_message for response in call(iter([request.body]), timeout=timeout)]
            text = "; ".join(filter(None, errors))
            return "refused" if text else "served", text
        call = wire.channel.unary_unary(f"/inference.GRPCInferenceService/{request.path}")
        call(request.body, timeout=timeout)
    except grpc.RpcError as error:
        code, text = error.code(), error.details() or ""
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return "hung", text
        return "cut" if code == grpc.StatusCode.UNAVAILABLE else "refused", text
    return "served", ""


def _value(rng: random.Random) -> Any:
    return rng.choice(TEXTS) if rng.random() < 0.4 else rng.choice(ODD)


def _fields(rng: random.Random) -> dict[str, Any]:
    """A small valid request with a few inputs replaced, added or taken away."""
    fields: dict[str, Any] = {"text_input": "Hello", "max_tokens": 1, "ignore_eos": True}
    for _ in range(rng.choice((1, 1, 2, 4))):
        fields[rng.choice([*NAMES, *INNER, "max_token", "é"])] = _value(rng)
    if rng.random() < 0.2:
        fields.pop(rng.choice(list(fields)))
    return fields if fields.get("max_tokens") in (None, 1) or rng.random() < 0.3 else {**fields, "max_tokens": 1}


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _generate_json(rng: random.Random) -> Malformed:
    path = f"/v2/models/{rng.choice(MODELS)}/{rng.choice(('generate', 'generate_stream'))}"
    return Malformed("JSON of wrong values to /generate", "http", path, _dumped(_fields(rng)))


def _broken_json(rng: random.Random) -> Malformed:
    path = f"/v2/models/{rng.choice(MODELS)}/{rng.choice(('generate', 'generate_stream', 'infer'))}"
    body = bytearray(_dumped(_fields(rng)))
    if rng.random() < 0.5:
        return Malformed("cut JSON", "http", path, bytes(body[: rng.randrange(len(body))]))
    for _ in range(rng.randrange(1, 6)):
        body[rng.randrange(len(body))] = rng.randrange(256)
    return Malformed("damaged JSON", "http", path, bytes(body))


def _random_bytes(rng: random.Random) -> Malformed:
    path = f"/v2/models/{rng.choice((*MODELS, 'nobody', '%00', '..'))}/{rng.choice(('generate', 'infer', 'x'))}"
    return Malformed("random bytes over HTTP", "http", path, rng.randbytes(rng.randrange(400)))


def _infer_json(rng: random.Random) -> Malformed:
    inputs = [
        {
            "name": rng.choice((*NAMES, *INNER)),
            "datatype": rng.choice(TYPES),
            "shape": rng.choice(([1, 1], [1], [], [0], [2, 1], [1, 1, 1], [-1, 1], ["1"], "1", [1, 300], [1.5, 1])),
            "data": rng.choice((_value(rng), [_value(rng)], [[_value(rng)]])),
        }
        for _ in range(rng.choice((0, 1, 2)))
    ]
    body = {"inputs": inputs, "parameters": {rng.choice(("sequence_id", "binary_data_output", "x")): _value(rng)}}
    return Malformed("JSON of wrong tensors to /infer", "http", f"/v2/models/{rng.choice(MODELS)}/infer", _dumped(body))


def _infer_binary(rng: random.Random) -> Malformed:
    header = _dumped(
        {
            "inputs": [
                {
                    "name": "text_input",
                    "datatype": "BYTES",
                    "shape": [1, 1],
                    "parameters": {"binary_data_size": rng.choice((0, 4, 9, 10**6, -1, "9"))},
                }
            ]
        }
    )
    length = rng.choice((len(header), 0, len(header) + 9, 2**40, -1, "x"))
    headers = (("Inference-Header-Content-Length", str(length)),)
    return Malformed(
        "binary tensors of another size",
        "http",
        f"/v2/models/{rng.choice(MODELS)}/infer",
        header + _strings(rng),
        headers,
    )


def _strings(rng: random.Random) -> bytes:
    """The raw form of a BYTES tensor, often with lengths that are not true."""
    data = rng.choice((b"Hello", b"\xff\xfe", b"", b'{"stop": 1}', rng.randbytes(30)))
    return struct.pack("<I", rng.choice((len(data), len(data), 0, 2**31, 2**32 - 1))) + data


def _message(rng: random.Random) -> Any:
    request = service_pb2.ModelInferRequest(model_name=rng.choice(MODELS), id=rng.choice(("", "x" * 300, "a")))
    if rng.random() < 0.7:
        if rng.random() < 0.5:
            request.parameters["sequence_id"].string_param = rng.choice(("s", "", "s" * 200, str(rng.random())))
        else:
            request.parameters["sequence_id"].int64_param = rng.choice((0, 1, -1, rng.getrandbits(62)))
        for name in ("sequence_start", "sequence_end"):
            if rng.random() < 0.9:
                request.parameters[name].bool_param = rng.random() < 0.8
            else:
                request.parameters[name].string_param = "yes"
    for _ in range(rng.choice((0, 1, 2, 4))):
        name, datatype = rng.choice((*NAMES, *INNER)), rng.choice(TYPES[:8])
        shape = rng.choice(([1, 1], [1, 1], [1, 3], [0, 1], [1, 0], [2, 1], [1], [1, 1, 1], [-1, 1]))
        request.inputs.add(name=name, datatype=datatype, shape=shape)
        if rng.random() < 0.9:
            raw = _strings(rng) if datatype == "BYTES" else rng.randbytes(rng.choice((0, 1, 4, 8, 12, 40)))
            request.raw_input_contents.append(raw)
    return request


def _grpc_message(rng: random.Random) -> Malformed:
    way = rng.choice(("unary", "stream"))
    return Malformed(f"wrong tensors over gRPC ({way})", way, "ModelInfer", _message(rng).SerializeToString())


def _grpc_damaged(rng: random.Random) -> Malformed:
    body, way = bytearray(_message(rng).SerializeToString()), rng.choice(("unary", "stream"))
    if body and rng.random() < 0.5:
        del body[rng.randrange(len(body)) :]
    else:
        body = bytearray(rng.randbytes(rng.randrange(200)))
    return Malformed("cut or random gRPC messages", way, "ModelInfer", bytes(body))


def _packet(rng: random.Random) -> dict[str, Any]:
    """A request or an event as the models pack it, with one or two values of another kind."""
    packed: dict[str, Any] = {"key": str(rng.random()), "sampling": {"max_tokens": 1}}
    if rng.random() < 0.5:
        packed = {"key": packed["key"], "index": 0, "kind": rng.choice(("tokens", "admitted", "finished", "error"))}
    names = ("key", "namespace", "session_id", "reuse", "end_ids", "bad_words", "stop_words", "sampling", "index", "x")
    for _ in range(rng.choice((1, 1, 2))):
        packed[rng.choice(names)] = rng.choice((_value(rng), {"max_tokens": _value(rng)}, [_value(rng)]))
    return packed


def _inner_packet(rng: random.Random) -> Malformed:
    """Tensors of the right types and shapes for the engine and the detokenizer, so that their contents are read."""
    model = rng.choice(("irminsul_engine", "irminsul_detokenizer"))
    request = service_pb2.ModelInferRequest(model_name=model)

    def add(name: str, datatype: str, raw: bytes, count: int = 1) -> None:
        request.inputs.add(name=name, datatype=datatype, shape=[1, count])
        request.raw_input_contents.append(raw)

    packed = _dumped(_packet(rng))
    text = struct.pack("<I", len(packed)) + packed
    ids = [20] * rng.choice((1, 4)) if rng.random() < 0.7 else rng.choice(([], [-1], [20, 2**31 - 1]))
    if model == "irminsul_engine":
        add("token_ids", "INT32", struct.pack(f"<{len(ids)}i", *ids), len(ids))
        add("chunk_ends", "INT32", struct.pack("<i", len(ids) if rng.random() < 0.8 else rng.choice((0, -1, 10**6))))
        add("fingerprints", "UINT64", struct.pack("<Q", 1))
        add("request", "BYTES", text)
    else:
        add("output_ids", "INT32", struct.pack(f"<{len(ids)}i", *ids), len(ids))
        add("output_log_probs", "FP32", struct.pack("<f", 0.5))
        add("event", "BYTES", text)
    return Malformed(f"{model} called directly", "stream", "", request.SerializeToString())


KINDS: tuple[Callable[[random.Random], Malformed], ...] = (
    _generate_json,
    _broken_json,
    _random_bytes,
    _infer_json,
    _infer_binary,
    _grpc_message,
    _grpc_damaged,
    _inner_packet,
)
