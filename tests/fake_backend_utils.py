"""A stand-in for Triton's `triton_python_backend_utils`, which exists only inside the server's stub processes.

It keeps the rules of the real module that a model can break: nothing may be sent after FINAL, a sender may not be asked
about its client after FINAL (that ends the real server), and an output that the client did not ask for must outlive the
send that drops it (the real module frees it without the interpreter lock). What the real module would hand to the
server is recorded. The `backend_utils` fixture installs it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1

TIMEOUT_S = 10


class TritonError:
    INTERNAL, INVALID_ARG, UNAVAILABLE, CANCELLED = "INTERNAL", "INVALID_ARG", "UNAVAILABLE", "CANCELLED"

    def __init__(self, message: str, code: str = INTERNAL) -> None:
        self._message, self._code = message, code

    def message(self) -> str:
        return self._message

    def code(self) -> str:
        return self._code


class Tensor:
    def __init__(self, name: str, array: np.ndarray, /) -> None:
        assert isinstance(array, np.ndarray), f"{name} is {array!r}, not an array"
        self._name, self._array = name, array

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = (), error: TritonError | None = None) -> None:
        self._outputs, self._error = list(output_tensors), error

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def prune(self, names: set[str]) -> list[weakref.ref[Tensor]]:
        """Drop all outputs but these; returns what was dropped, as far as somebody still holds it."""
        dropped = [weakref.ref(tensor) for tensor in self._outputs if tensor.name() not in names]
        self._outputs = [tensor for tensor in self._outputs if tensor.name() in names]
        return dropped

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class InferenceResponseSender:
    """Records what a client receives."""

    def __init__(self, requested_output_names: Sequence[str] = ()) -> None:
        self._requested = set(requested_output_names)
        self.responses: list[InferenceResponse] = []
        self.ended = threading.Event()
        """Set by FINAL."""
        self.misuse: list[str] = []
        """What the real server would not have survived, or would have refused."""
        self.lost = False
        """Whether a send with FINAL has failed: it counts as sent, and the client waits for ever."""
        self.cancelled = False
        self.failures: list[Exception] = []
        """Raised by the next calls of :meth:`send`, one each; nothing is sent then."""
        self.cancel_failures: list[Exception] = []
        """The same for :meth:`is_cancelled`."""

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.lost:
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        if self.ended.is_set():
            self.misuse.append("sent after FINAL")
            raise RuntimeError("Unable to send response. Response sender has been closed.")
        if response is None and not flags:
            self.misuse.append("neither a response nor FINAL")
            raise RuntimeError("there is nothing to send")
        if self.failures:
            self.lost = bool(flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            raise self.failures.pop(0)
        if response is not None:
            dropped = response.prune(self._requested) if self._requested else []
            if any(tensor() is None for tensor in dropped):
                self.misuse.append("an output was freed while it was sent")
            self.responses.append(response)
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.ended.set()

    def is_cancelled(self) -> bool:
        if self.ended.is_set():
            self.misuse.append("asked about the client after FINAL")
        if self.cancel_failures:
            raise self.cancel_failures.pop(0)
        return self.cancelled

    def wait(self) -> list[InferenceResponse]:
        """All responses of the request, once it has ended by the rules."""
        assert self.ended.wait(TIMEOUT_S), f"no FINAL after {len(self.responses)} responses"
        assert not self.misuse
        return self.responses

    def errors(self) -> list[str]:
        """The text of each error among the responses, once the request has ended."""
        return [error.message() for response in self.wait() if (error := response.error())]


def bls(request: InferenceRequest) -> Iterable[InferenceResponse]:
    """Answer a request that a model makes itself. Tests put their own function here."""
    raise RuntimeError(f"model {request.model_name} is not loaded")


class InferenceRequest:
    """A request that reaches a model, or that a model makes."""

    def __init__(
        self,
        *,
        inputs: Sequence[Tensor],
        model_name: str = "",
        requested_output_names: Sequence[str] = (),
        correlation_id: int | str = 0,
        flags: int = 0,
    ) -> None:
        self.model_name = model_name
        self.sender = InferenceResponseSender(requested_output_names)
        self._inputs, self._correlation_id, self._flags = list(inputs), correlation_id, flags

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def flags(self) -> int:
        return self._flags

    def get_response_sender(self) -> InferenceResponseSender:
        return self.sender

    def exec(self, decoupled: bool) -> Iterator[InferenceResponse]:
        assert decoupled, "a model may not wait for another one inside execute"
        return iter(bls(self))


class Metric:
    def __init__(self) -> None:
        self.value = 0.0
        self.observations: list[float] = []

    def increment(self, value: float, /) -> None:
        assert value >= 0, "a counter does not go down"
        self.value += value

    def set(self, value: float, /) -> None:
        self.value = value

    def observe(self, value: float, /) -> None:
        self.observations.append(value)


metrics: dict[str, Metric] = {}
"""Every metric, by its name with labels, as in Prometheus' text format."""


class MetricFamily:
    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

    def __init__(self, *, name: str, description: str, kind: str) -> None:
        self._name, self._kind = name, kind

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        assert (buckets is not None) == (self._kind == self.HISTOGRAM), "a histogram has buckets, nothing else has"
        text = ",".join(f'{name}="{value}"' for name, value in (labels or {}).items())
        return metrics.setdefault(f"{self._name}{{{text}}}" if text else self._name, Metric())


def outputs(response: InferenceResponse) -> dict[str, Any]:
    """The outputs of a response as plain values: text, a number, or a list of numbers."""
    assert response.error() is None, response.error().message()
    return {tensor.name(): _plain(tensor.as_numpy()) for tensor in response.output_tensors()}


def _plain(array: np.ndarray) -> Any:
    return array.item().decode(errors="replace") if array.dtype == object else array[0].tolist()
