"""Triton's gRPC protocol: requests to protobuf and back, one ModelStreamInfer call per request.

``tritonclient.grpc.InferenceServerClient`` holds at most one stream, and cancelling that stream cancels every request
on it. So this module calls the generated stub itself: each request is a stream of its own on one shared HTTP/2
channel. Cancelling or timing out ends exactly one request, any number run at once, responses are read in the caller's
own thread (or greenlet), and no callback thread is needed.

Triton's ``triton_grpc_error`` header, which would add status codes to failures, must not be sent: a 2.51 server dies
after some hundred refused requests that carry it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2, service_pb2_grpc

from irminsul_client._inputs import TENSORS
from irminsul_client._request import shorten
from irminsul_client._transport import Request, Response
from irminsul_client.errors import (
    InvalidRequest,
    IrminsulClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    server_error,
)

NUMPY_TYPES = {"INT32": "<i4", "INT64": "<i8", "UINT64": "<u8", "FP32": "<f4", "FP64": "<f8", "BOOL": "?"}
CHANNEL_OPTIONS = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


def encode_tensor(name: str, value: Any) -> tuple[str, list[int], bytes]:
    """(datatype, shape with a batch dimension of 1, raw bytes). Raises InvalidRequest if the value does not fit."""
    datatype, is_list = TENSORS[name]
    values = list(value) if is_list else [value]
    try:
        if datatype == "BYTES":
            raw = b"".join(_length_prefixed(v) for v in values)
        else:
            raw = _to_array(values, datatype).tobytes()
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(
            f"{name} is {shorten(value)}; it must be {datatype}{' values' if is_list else ''} ({error})"
        ) from error
    return datatype, [1, len(values)], raw


def _length_prefixed(value: str | bytes) -> bytes:
    if not isinstance(value, str | bytes):  # bytes(3) would be three zeros
        raise TypeError(f"only text, not {type(value).__name__}")
    data = value.encode() if isinstance(value, str) else value
    return len(data).to_bytes(4, "little") + data


def _to_array(values: list[Any], datatype: str) -> np.ndarray[Any, Any]:
    dtype = np.dtype(NUMPY_TYPES[datatype])
    array = np.asarray(values)
    if dtype.kind in "iu" and array.size:
        limits = np.iinfo(dtype)
        if array.dtype.kind not in "iu" or int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ValueError(f"only whole numbers from {limits.min} to {limits.max}")
    return array.astype(dtype)


def encode_request(model: str, request: Request) -> Any:
    """The ModelInferRequest protobuf message. Raises InvalidRequest for a value that cannot be sent."""
    message = service_pb2.ModelInferRequest(model_name=model, id=request.id)
    try:
        message.parameters["sequence_id"].string_param = request.session_id
    except ValueError as error:
        raise InvalidRequest(f"session id {request.session_id!r} is not valid text: {error}") from error
    message.parameters["sequence_start"].bool_param = request.start
    message.parameters["sequence_end"].bool_param = request.end
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    for name, value in request.fields.items():
        datatype, shape, raw = encode_tensor(name, value)
        message.inputs.add(name=name, datatype=datatype, shape=shape)
        message.raw_input_contents.append(raw)
    return message


def decode_response(message: Any) -> Response:
    """Outputs of a ModelInferResponse: BYTES of one element → str, every other tensor → list."""
    outputs: dict[str, Any] = {}
    for output, raw in zip(message.outputs, message.raw_output_contents, strict=True):
        if output.datatype == "BYTES":
            texts = list(_split_prefixed(raw))
            outputs[output.name] = texts[0] if len(texts) == 1 else texts
        elif output.datatype in NUMPY_TYPES:
            outputs[output.name] = np.frombuffer(raw, NUMPY_TYPES[output.datatype]).tolist()
        else:
            raise ServerError(f"output {output.name} has the unexpected datatype {output.datatype}")
    return Response(outputs, final=message.parameters["triton_final_response"].bool_param)


def _split_prefixed(raw: bytes) -> Iterator[str]:
    at = 0
    while at < len(raw):
        size = int.from_bytes(raw[at : at + 4], "little")
        yield raw[at + 4 : at + 4 + size].decode(errors="replace")
        at += 4 + size


class GrpcTransport:
    """Calls one Triton model over one channel; see the module's docstring."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self._channel = grpc.insecure_channel(url, options=CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def call(self, request: Request, timeout: float | None) -> GrpcCall:
        message = encode_request(self.model, request)
        try:
            call = self._stub.ModelStreamInfer(iter([message]), timeout=timeout)
        except ValueError as error:  # grpc's way to say that the channel is closed
            raise RequestCancelled("the client is closed") from error
        return GrpcCall(call, self, timeout)

    def check_ready(self, timeout: float) -> None:
        try:
            request = service_pb2.ModelReadyRequest(name=self.model)
            ready = self._stub.ModelReady(request, timeout=timeout).ready
        except grpc.RpcError as error:
            raise self.translate(error, timeout) from error
        if not ready:
            raise ServerUnavailable(f"the server at {self.url} answers, but its model {self.model!r} is not ready")

    def close(self) -> None:
        self._channel.close()

    def translate(self, error: Any, timeout: float | None) -> IrminsulClientError:
        """The client's error for a grpc.RpcError."""
        code, details = error.code(), error.details() or ""
        if code == grpc.StatusCode.UNAVAILABLE:
            return ServerUnavailable(f"cannot reach an Irminsul server at {self.url} ({details})")
        if code == grpc.StatusCode.DEADLINE_EXCEEDED:
            return RequestTimeout(f"no complete answer from {self.url} within the timeout of {timeout} s")
        if code == grpc.StatusCode.CANCELLED:
            return RequestCancelled(f"the request was cancelled ({details})")
        if code == grpc.StatusCode.UNIMPLEMENTED and not details.startswith("["):
            return ServerUnavailable(f"{self.url} speaks gRPC but is no Triton server ({details})")
        return server_error(details or str(code))


class GrpcCall:
    """One running ModelStreamInfer call."""

    def __init__(self, call: Any, transport: GrpcTransport, timeout: float | None) -> None:
        self._call = call
        self._transport = transport
        self._timeout = timeout

    def __iter__(self) -> Iterator[Response]:
        try:
            for message in self._call:
                if message.error_message:
                    raise server_error(message.error_message)
                yield decode_response(message.infer_response)
        except grpc.RpcError as error:
            raise self._transport.translate(error, self._timeout) from error

    def cancel(self) -> None:
        self._call.cancel()
