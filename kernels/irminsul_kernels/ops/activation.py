"""silu(gate) * up, the gate of a feed-forward block.

Bytes moved: 3 * inner * itemsize per token (two halves read, one written), the minimum: each element is moved once.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from irminsul_kernels.device_math import INTERPRET, TYPE_NAMES, rounded, use_kernel
from irminsul_kernels.launch import KernelConfig

BLOCK = 2048


def silu_gate_reference(gate_up: Tensor) -> Tensor:
    """[..., 2 I] -> [..., I] in gate_up's dtype, computed in float32 (float64 for float64) and rounded once."""
    wide = torch.promote_types(gate_up.dtype, torch.float32)
    gate, up = gate_up.to(wide).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second half.

    Args:
        gate_up: [..., 2 I], bf16, fp16 or fp32, contiguous.

    Returns:
        [..., I] in the same dtype.

    Raises:
        ValueError: an odd last dimension, another dtype, a tensor that is not contiguous.
    """
    if gate_up.dtype not in TYPE_NAMES:
        raise ValueError(f"gate_up is {gate_up.dtype}; it must be bfloat16, float16 or float32")
    if gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
        raise ValueError(f"gate_up has shape {tuple(gate_up.shape)}; its last dimension must be even: gate, then up")
    if not gate_up.is_contiguous():
        raise ValueError(f"gate_up has strides {gate_up.stride()}; make it contiguous")
    if not use_kernel(gate_up):
        return silu_gate_reference(gate_up)
    inner = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], inner)
    if out.numel():
        tokens = out.numel() // inner
        silu_gate_kernel[(tokens, triton.cdiv(inner, BLOCK))](
            gate_up, out, inner, BLOCK=BLOCK, INTERPRET=INTERPRET, num_warps=8
        )
    return out


@triton.jit
def silu_gate_kernel(gate_up, out, inner, BLOCK: tl.constexpr, INTERPRET: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_up + token * 2 * inner + i, mask=i < inner, other=0).to(tl.float32)
    up = tl.load(gate_up + token * 2 * inner + inner + i, mask=i < inner, other=0).to(tl.float32)
    gated = gate / (1 + tl.exp(-gate)) * up
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + token * inner + i, rounded(gated, dtype, INTERPRET).to(dtype), mask=i < inner)


def aot_configs(arch: int) -> list[KernelConfig]:
    """bf16; the same on every architecture."""
    signature: dict[str, Any] = dict(gate_up="*bf16", out="*bf16", inner="i32")
    constexprs = dict(BLOCK=BLOCK, INTERPRET=False)
    aligned = ("gate_up", "out", "inner")
    return [KernelConfig("SiLU gate, bf16", silu_gate_kernel, signature, constexprs, 8, 1, aligned)]
