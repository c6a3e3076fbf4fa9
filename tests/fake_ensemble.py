"""A small real gRPC server that speaks Triton's protocol as the ensemble does, with the batcher's session rules.

It answers with the words of the prompt, so that every test knows the right answer, and it records what it saw.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc


@dataclass
class Seen:
    """One request as it arrived."""

    session_id: str
    start: bool
    end: bool
    id: str
    inputs: dict[str, Any]
    cancelled: bool = False
    finished: bool = False

    def prompt(self) -> str:
        """The text of the prompt, or of the last message."""
        if "messages" in self.inputs:
            return str(json.loads(self.inputs["messages"][2][4:])[-1]["content"])
        return self.inputs["text_input"][2][4:].decode() if "text_input" in self.inputs else ""


@dataclass
class FakeEnsemble(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Streams the prompt's words back, one response a word, after two progress responses."""

    address: str = ""
    seen: list[Seen] = field(default_factory=list)
    open_sessions: set[str] = field(default_factory=set)
    expired_message: str = "sequence id must specify the START flag on the first request of the sequence"
    running: int = 0
    most_running: int = 0
    hold: threading.Event = field(default_factory=threading.Event)
    """While it is clear, every stream waits after its first word."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def ModelReady(self, request: Any, context: grpc.ServicerContext) -> Any:
        return service_pb2.ModelReadyResponse(ready=request.name == "irminsul")

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        for request in requests:
            seen = self._read(request)
            with self.lock:
                self.seen.append(seen)
                self.running += 1
                self.most_running = max(self.most_running, self.running)
            context.add_callback(lambda seen=seen: setattr(seen, "cancelled", not seen.finished))
            try:
                yield from self._answer(seen, context)
            finally:
                with self.lock:
                    self.running -= 1

    def _read(self, request: Any) -> Seen:
        inputs: dict[str, Any] = {}
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            inputs[tensor.name] = (tensor.datatype, list(tensor.shape), raw)
        p = request.parameters
        assert p["triton_enable_empty_final_response"].bool_param
        return Seen(
            p["sequence_id"].string_param,
            p["sequence_start"].bool_param,
            p["sequence_end"].bool_param,
            request.id,
            inputs,
        )

    def _answer(self, seen: Seen, context: grpc.ServicerContext) -> Iterator[Any]:
        known = seen.session_id in self.open_sessions
        if not seen.start and not known:
            yield self._error(seen, self.expired_message)
            return
        if seen.end:
            self.open_sessions.discard(seen.session_id)
        else:
            self.open_sessions.add(seen.session_id)
        if seen.start and known:
            yield self._error(seen, f"session '{seen.session_id}' is already open")
            return
        text = seen.prompt()
        if not text:
            yield self._error(seen, "the prompt is empty")
            return
        if text == "invalid":
            yield self._error(seen, "max_tokens is 0; it must be at least 1")
            return
        if text == "vanish":
            seen.finished = True
            return
        words = text.split()
        for index in range(2):
            yield self._response(seen, index, "", [])
        for index, word in enumerate(words, 2):
            yield self._response(seen, index, word + " ", [len(word)])
            while not self.hold.is_set() and context.is_active():
                time.sleep(0.005)
        usage = {"prompt_tokens": 9, "exact_tokens": 2, "shifted_tokens": 3, "computed_tokens": 4, "segments": 1}
        usage |= {"segment_map": [[2, 3, -5]], "completion_tokens": len(words), "queue_ms": 0.5, "ttft_ms": 1.5}
        seen.finished = True
        yield self._response(seen, len(words) + 2, "", [], "length", json.dumps(usage | {"later_field": 1}))
        yield self._response(seen, -1, "", [], final=True)

    def _response(
        self, seen: Seen, index: int, text: str, ids: list[int], reason: str = "", usage: str = "", final: bool = False
    ) -> Any:
        response = service_pb2.ModelInferResponse(model_name="irminsul", id=seen.id)
        response.parameters["triton_final_response"].bool_param = final
        if not final:
            for name, value in (("text_output", text), ("finish_reason", reason), ("usage", usage)):
                response.outputs.add(name=name, datatype="BYTES", shape=[1, 1])
                data = value.encode()
                response.raw_output_contents.append(len(data).to_bytes(4, "little") + data)
            for name, values in (("output_ids", ids), ("index", [index])):
                response.outputs.add(name=name, datatype="INT32", shape=[1, len(values)])
                response.raw_output_contents.append(b"".join(v.to_bytes(4, "little", signed=True) for v in values))
        return service_pb2.ModelStreamInferResponse(infer_response=response)

    def _error(self, seen: Seen, message: str) -> Any:
        seen.finished = True
        return service_pb2.ModelStreamInferResponse(error_message=message)


@pytest.fixture
def ensemble() -> Iterator[FakeEnsemble]:
    """A running FakeEnsemble on a free port, streaming freely."""
    service = FakeEnsemble()
    service.hold.set()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=32))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield service
    service.hold.set()
    server.stop(grace=None).wait()
