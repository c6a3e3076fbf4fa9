"""Names, types and shapes of the tensors at the Triton border, and how they become plain Python.

Every tensor has a batch axis in front (`max_batch_size` is 8, because that is what TRT-LLM's clients send), and every
request has a batch of one. `dims` below is what follows that axis: 1, or -1 for any length.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.request_spec import INPUTS


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a model's configuration."""

    name: str
    dtype: str
    """Triton's name without TYPE_: STRING, INT32, UINT64, FP32, BOOL."""
    dims: int = 1


NUMPY = {"STRING": np.object_, "INT32": np.int32, "UINT64": np.uint64, "FP32": np.float32, "BOOL": np.bool_}

REQUEST_INPUTS = tuple(TensorSpec(i.name, i.dtype, i.dims) for i in INPUTS if not i.endpoints_only)
"""Inputs of `irminsul` and `irminsul_chunker`, all optional."""

SESSION_INPUTS = tuple(TensorSpec(i.name, i.dtype, i.dims) for i in INPUTS if i.endpoints_only)
"""What `irminsul_generate` and `irminsul_unary` take besides: HTTP cannot carry a correlation id."""

PLAN_TENSORS = (
    TensorSpec("token_ids", "INT32", -1),
    TensorSpec("chunk_ends", "INT32", -1),
    TensorSpec("fingerprints", "UINT64", -1),
    TensorSpec("request", "STRING"),
)
"""From `irminsul_chunker` to `irminsul_engine`."""

CONTROL_INPUT = TensorSpec("control", "STRING")
"""To `irminsul_engine`, instead of the above: JSON {"stop": key} or {"status": true}."""

EVENT_TENSORS = (
    TensorSpec("output_ids", "INT32", -1),
    TensorSpec("output_log_probs", "FP32", -1),
    TensorSpec("event", "STRING"),
)
"""From `irminsul_engine` to `irminsul_detokenizer`."""

RESPONSE_OUTPUTS = (
    TensorSpec("text_output", "STRING"),
    TensorSpec("finish_reason", "STRING"),
    TensorSpec("index", "INT32"),
    TensorSpec("output_ids", "INT32", -1),
    TensorSpec("output_log_probs", "FP32", -1),
    TensorSpec("num_input_tokens", "INT32"),
    TensorSpec("num_output_tokens", "INT32"),
    TensorSpec("usage", "STRING"),
)
"""Outputs of `irminsul`, `irminsul_generate` and `irminsul_unary`."""


def to_array(spec: TensorSpec, value: Any) -> npt.NDArray[Any]:
    """`value` (a scalar, or a sequence where dims is -1) as [1, n] of the tensor's type; text becomes UTF-8 bytes."""
    values = [value] if spec.dims == 1 else value
    if spec.dtype == "STRING":
        values = [v.encode() if isinstance(v, str) else v for v in values]
    return np.asarray(values, dtype=NUMPY[spec.dtype]).reshape(1, -1)


def from_array(spec: TensorSpec, array: npt.NDArray[Any]) -> Any:
    """The value of a [1, n] tensor: a scalar where dims is 1, else an array [n]; for STRING bytes, or a list of bytes.

    Raises InvalidRequestError on a batch.
    """
    check_shape(spec.name, array)
    values = array[0]
    if spec.dtype == "STRING":
        return values[0] if spec.dims == 1 else values.tolist()
    return values[0].item() if spec.dims == 1 else values


def check_shape(name: str, array: npt.NDArray[Any]) -> None:
    """Raise InvalidRequestError unless `array` is a batch of one."""
    if array.ndim != 2 or array.shape[0] != 1:
        raise InvalidRequestError(f"{name} has shape {list(array.shape)}; send one request at a time, shape [1, n]")


def read_fields(request: Any, specs: Iterable[TensorSpec]) -> dict[str, Any]:
    """The tensors that a Python-backend request carries, by name; an absent optional input is an absent key."""
    wanted = {spec.name: spec for spec in specs}
    return {
        tensor.name(): from_array(wanted[tensor.name()], tensor.as_numpy())
        for tensor in request.inputs()
        if tensor.name() in wanted
    }
