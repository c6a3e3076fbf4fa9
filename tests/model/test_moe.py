"""The mixture of experts against a loop in float64, and what it must not do: read idle experts, wait for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode

from irminsul_backend.model.moe import MoE

EXPERTS, INNER, HIDDEN, TOP_K = 12, 24, 40, 3


def make_moe(dtype: torch.dtype = torch.float32, device: str = "cpu", **changes: Any) -> MoE:
    """Random experts behind a noaux_tc router with two of four groups kept, one shared expert."""
    values = {
        "num_experts_per_tok": TOP_K, "n_group": 4, "topk_group": 2, "topk_method": "noaux_tc", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "n_shared_experts": 1, "n_routed_experts": EXPERTS, "hidden_size": HIDDEN,
        "moe_intermediate_size": INNER,
    }  # fmt: skip
    shapes = {
        "router": (EXPERTS, HIDDEN), "router_bias": (EXPERTS,), "experts.gate_up": (EXPERTS, 2 * INNER, HIDDEN),
        "experts.down": (EXPERTS, HIDDEN, INNER), "shared.gate_up": (2 * INNER, HIDDEN), "shared.down": (HIDDEN, INNER),
    }  # fmt: skip

    def read(name: str) -> torch.Tensor:
        kind = torch.float32 if "router" in name else dtype
        return torch.randn(shapes[name.removeprefix("moe.")], device=device).mul_(0.3).to(kind)

    checkpoint = SimpleNamespace(read=read, dtype=dtype, device=torch.device(device))
    return MoE(SimpleNamespace(**values | changes), checkpoint, "moe")  # type: ignore[arg-type]


def gated(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, up = (x @ gate_up.double().T).chunk(2, dim=-1)
    return (torch.nn.functional.silu(gate) * up) @ down.double().T


def reference(moe: MoE, x: torch.Tensor) -> torch.Tensor:
    """float64 [T, hidden], token by token and expert by expert."""
    assert moe.shared is not None
    chosen, weights = moe.router(x)
    out = gated(x.double(), moe.shared.gate_up, moe.shared.down)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token].tolist(), weights[token].double(), strict=True):
            out[token] += weight * gated(x[token].double(), moe.gate_up[expert], moe.down[expert])
    return out


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("count", [1, 2, 7, 50])
def test_equals_a_loop_in_float64(count: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(count)
    moe, x = make_moe(dtype), torch.randn(count, HIDDEN).to(dtype)
    expected, got = reference(moe, x), moe(x)
    assert got.dtype == dtype and got.shape == x.shape
    assert (got - expected).norm() <= tolerance * expected.norm()


def test_experts_that_no_token_chose_are_not_read() -> None:
    torch.manual_seed(0)
    moe, x = make_moe(), torch.randn(2, HIDDEN)
    expected = moe(x)
    idle = sorted(set(range(EXPERTS)) - set(moe.router(x)[0].flatten().tolist()))
    assert len(idle) >= EXPERTS - 2 * TOP_K
    moe.gate_up[idle] = moe.down[idle] = float("nan")
    assert torch.equal(moe(x), expected)


def test_all_tokens_on_the_same_experts() -> None:
    torch.manual_seed(0)
    moe, x = make_moe(), torch.randn(1, HIDDEN).expand(30, HIDDEN).contiguous()
    assert torch.allclose(moe(x), moe(x[:1]).expand(30, HIDDEN), atol=1e-5)


def test_nothing_on_the_way_waits_for_the_device() -> None:
    """Fake tensors have no values: whatever reads one on the host, or has a size that depends on one, raises."""
    with FakeTensorMode():
        moe, x = make_moe(torch.bfloat16), torch.randn(9, HIDDEN, dtype=torch.bfloat16)
        assert moe(x).shape == x.shape
        with pytest.raises(DynamicOutputShapeException):  # as such a call would
            torch.bincount(moe.router(x)[0].flatten())
