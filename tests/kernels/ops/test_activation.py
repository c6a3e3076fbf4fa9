"""silu(gate) * up against float64."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from irminsul_kernels.ops.activation import silu_gate, silu_gate_reference

TOLERANCE = {torch.bfloat16: 2e-3, torch.float16: 3e-4, torch.float32: 1e-6}


def error(dtype: torch.dtype, shape: tuple[int, ...]) -> float:
    gate_up = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    exact = silu_gate_reference(gate_up.double())
    return ((silu_gate(gate_up).double() - exact).norm() / exact.norm()).item()


SHAPES = [(1, 2), (3, 200), (2, 2, 8192)]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_against_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert error(dtype, shape) < TOLERANCE[dtype]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", SHAPES)
def test_kernel_against_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert error(dtype, shape) < TOLERANCE[dtype]


@pytest.mark.interpreter
def test_extreme_gates_do_not_overflow() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, -90.0, 0.0, 1.0, 2.0, 3.0, 4.0]])
    assert silu_gate(gate_up).tolist() == [[0.0, 2e4, pytest.approx(0, abs=1e-30), 0.0]]


def test_no_token_gives_no_token() -> None:
    assert silu_gate(torch.zeros(0, 8)).shape == (0, 4)


@pytest.mark.parametrize(
    ("gate_up", "message"),
    [
        (torch.zeros(2, 3), "must be even"),
        (torch.zeros(2, 4, dtype=torch.float64), "float64"),
        (torch.zeros(4, 2).T, "contiguous"),
    ],
)
def test_wrong_input_names_itself(gate_up: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        silu_gate(gate_up)
