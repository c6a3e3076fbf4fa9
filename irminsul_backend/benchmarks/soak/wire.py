"""Requests as they go over the wire, below any client: whatever tensors, bodies and bytes a test wants to send."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else a server's death makes the next one at its address seem away
)
TYPES = {"i": "INT32", "u": "UINT64", "f": "FP32", "b": "BOOL"}


class Reply(NamedTuple):
    """What came back: outputs of every response, or an error's own words."""

    outputs: list[dict[str, Any]]
    error: str
    hung: bool = False
    """No end of the answer within the time allowed."""

    def joined(self, name: str) -> list[Any]:
        return [value for outputs in self.outputs for value in outputs.get(name, ())]

    @property
    def usage(self) -> dict[str, Any]:
        return dict(json.loads(self.joined("usage")[-1]))


class Wire:
    """A gRPC channel to one server."""

    def __init__(self, url: str) -> None:
        self.channel = grpc.insecure_channel(url, options=OPTIONS)
        self.stub = service_pb2_grpc.GRPCInferenceServiceStub(self.channel)

    def ask(
        self, model: str, session: int | str | None = None, flags: int = 3, timeout: float = 20, **tensors: Any
    ) -> Reply:
        """Send one request as a stream of its own. flags: 1 START, 2 END; without a session none are sent."""
        return self.send(message(model, session, flags, **tensors), timeout)

    def send(self, request: Any, timeout: float = 20) -> Reply:
        outputs: list[dict[str, Any]] = []
        try:
            for response in self.stub.ModelStreamInfer(iter([request]), timeout=timeout):
                if response.error_message:
                    return Reply(outputs, response.error_message)
                if response.infer_response.outputs:
                    outputs.append(read_outputs(response.infer_response))
        except grpc.RpcError as error:
            code = error.code()
            return Reply(outputs, f"{code}: {error.details()}", code == grpc.StatusCode.DEADLINE_EXCEEDED)
        return Reply(outputs, "")

    def close(self) -> None:
        self.channel.close()


def message(model: str, session: int | str | None = None, flags: int = 3, **tensors: Any) -> Any:
    """A ModelInferRequest. Tensors are numpy arrays or lists of numbers, texts or bytes; each gets shape [1, n]."""
    request = service_pb2.ModelInferRequest(model_name=model)
    if session is not None:
        if isinstance(session, str):
            request.parameters["sequence_id"].string_param = session
        else:
            request.parameters["sequence_id"].int64_param = session
        request.parameters["sequence_start"].bool_param = bool(flags & 1)
        request.parameters["sequence_end"].bool_param = bool(flags & 2)
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in tensors.items():
        datatype, count, raw = encode(value)
        request.inputs.add(name=name, datatype=datatype, shape=[1, count])
        request.raw_input_contents.append(raw)
    return request


def encode(value: Any) -> tuple[str, int, bytes]:
    """(datatype, elements, raw bytes)."""
    values = value if isinstance(value, list | np.ndarray) else [value]
    if len(values) and isinstance(values[0], str | bytes):
        encoded = [v.encode() if isinstance(v, str) else v for v in values]
        return "BYTES", len(values), b"".join(len(v).to_bytes(4, "little") + v for v in encoded)
    array = np.asarray(values)
    if not isinstance(value, np.ndarray):
        array = array.astype({"i": np.int32, "f": np.float32}.get(array.dtype.kind, array.dtype))
    return TYPES[array.dtype.kind], array.size, array.tobytes()


def read_outputs(response: Any) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            values[output.name] = [raw[4:].decode(errors="replace")]  # every text output has one element
        else:
            kind = {"INT32": "<i4", "FP32": "<f4"}[output.datatype]
            values[output.name] = np.frombuffer(raw, kind).tolist()
    return values


class Http:
    """One kept-alive HTTP connection."""

    def __init__(self, url: str, timeout: float = 20) -> None:
        self._address = urlsplit(url).netloc
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None

    def post(
        self, path: str, body: bytes | Mapping[str, Any], headers: Mapping[str, str] | None = None, method: str = "POST"
    ) -> tuple[int, str]:
        """(status, text). Status 0 stands for no answer in time, -1 for a connection that was refused or cut."""
        if self._connection is None:
            self._connection = http.client.HTTPConnection(self._address, timeout=self._timeout)
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        try:
            self._connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
            response = self._connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        except TimeoutError:
            self.close()
            return 0, "no answer in time"
        except (OSError, http.client.HTTPException) as error:
            self.close()
            return -1, f"{type(error).__name__}: {error}"

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
