"""The part of Triton's Python-backend module that Irminsul uses; the module itself exists only in the stub processes.

Sources: NVIDIA's python_backend, `src/pb_stub.cc` for the classes and `src/resources/triton_python_backend_utils.py`
for the constants. A parameter that pybind11 gives no name is positional-only here.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Literal

import numpy.typing as npt

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START: Final = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END: Final = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL: Final = 1

class _ErrorCode: ...

class TritonError:
    UNKNOWN: ClassVar[_ErrorCode]
    INTERNAL: ClassVar[_ErrorCode]
    NOT_FOUND: ClassVar[_ErrorCode]
    INVALID_ARG: ClassVar[_ErrorCode]
    UNAVAILABLE: ClassVar[_ErrorCode]
    UNSUPPORTED: ClassVar[_ErrorCode]
    ALREADY_EXISTS: ClassVar[_ErrorCode]
    CANCELLED: ClassVar[_ErrorCode]
    def __init__(self, message: str, code: _ErrorCode = ...) -> None:
        """`code` is INTERNAL unless given."""

    def message(self) -> str: ...
    def code(self) -> _ErrorCode: ...

class Tensor:
    def __init__(self, name: str, array: npt.NDArray[Any], /) -> None: ...
    def name(self) -> str: ...
    def as_numpy(self) -> npt.NDArray[Any]:
        """A view of shared memory for numbers; for TYPE_STRING an array of bytes objects."""

class InferenceResponse:
    def __init__(self, output_tensors: Sequence[Tensor] = ..., error: TritonError | None = None) -> None: ...
    def output_tensors(self) -> list[Tensor]: ...
    def has_error(self) -> bool: ...
    def error(self) -> TritonError | None:
        """None exactly if `has_error()` is False."""

class InferenceResponseSender:
    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Raises an exception after a send with FINAL, for flags other than 0 and FINAL, and for neither a response nor
        FINAL. A send with FINAL counts as sent even if it raises."""

    def is_cancelled(self) -> bool:
        """Whether the client cancelled the request or disconnected. Not to be called after FINAL."""

class InferenceRequest:
    def __init__(
        self,
        *,
        model_name: str,
        requested_output_names: Sequence[str],
        inputs: Sequence[Tensor],
        correlation_id: int | str = 0,
        flags: int = 0,
    ) -> None: ...
    def inputs(self) -> list[Tensor]: ...
    def correlation_id(self) -> int | str: ...
    def flags(self) -> int: ...
    def get_response_sender(self) -> InferenceResponseSender: ...
    def exec(self, decoupled: Literal[True]) -> Iterator[InferenceResponse]:
        """Call the model `model_name` and yield its responses as they come. The last one may be empty."""

class MetricKind: ...

class Metric:
    def increment(self, value: float, /) -> None: ...
    def set(self, value: float, /) -> None: ...
    def observe(self, value: float, /) -> None: ...

_Metric = Metric

class MetricFamily:
    COUNTER: ClassVar[MetricKind]
    GAUGE: ClassVar[MetricKind]
    HISTOGRAM: ClassVar[MetricKind]
    def __init__(self, *, name: str, description: str, kind: MetricKind) -> None: ...
    def Metric(self, labels: Mapping[str, str] | None = None, buckets: list[float] | None = None) -> _Metric:
        """`buckets`: upper bounds, ascending, of a histogram; not allowed for the other kinds."""
