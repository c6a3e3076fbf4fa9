"""Lets the border's modules be imported outside a stub process, and makes the requests that reach them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import fake_backend_utils
import pytest

from irminsul_backend.triton_io.tensors import (
    CONTROL_INPUT,
    EVENT_TENSORS,
    PLAN_TENSORS,
    REQUEST_INPUTS,
    SESSION_INPUTS,
    to_array,
)

SPECS = {s.name: s for s in (*REQUEST_INPUTS, *SESSION_INPUTS, *PLAN_TENSORS, CONTROL_INPUT, *EVENT_TENSORS)}
BORDER = ("steps", "engine_model", "endpoints", "metrics", "build")


@pytest.fixture
def backend_utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The fake of Triton's module, in its place. A model's request to another model fails unless a test sets `bls`."""
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake_backend_utils)
    monkeypatch.setattr(fake_backend_utils, "metrics", {})
    return fake_backend_utils


@pytest.fixture
def border(backend_utils: ModuleType) -> Iterator[Callable[[str], Any]]:
    """Import a module of `irminsul_backend.triton_io` that needs Triton's; it is forgotten after the test."""
    yield lambda name: importlib.import_module(f"irminsul_backend.triton_io.{name}")
    for name in BORDER:
        sys.modules.pop(f"irminsul_backend.triton_io.{name}", None)


@pytest.fixture
def make_request(backend_utils: ModuleType) -> Callable[..., Any]:
    """Make a request as Triton hands it to a model, from plain values by input name."""

    def make(session: int | str = 0, flags: int = 0, outputs: Sequence[str] = (), **inputs: Any) -> Any:
        tensors = [backend_utils.Tensor(name, to_array(SPECS[name], value)) for name, value in inputs.items()]
        return backend_utils.InferenceRequest(
            inputs=tensors, correlation_id=session, flags=flags, requested_output_names=outputs
        )

    return make
