"""Device functions shared by the kernels, compiled for a GPU or interpreted on the CPU.

The interpreter (TRITON_INTERPRET=1) computes bf16 on raw bits and truncates fp32 to bf16. So there every operand is
fp32 that holds values of the narrow type, rounded to nearest as a GPU does: results have a GPU's rounding errors.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

INTERPRET = bool(triton.knobs.runtime.interpret)
"""Whether kernels of this process run on the CPU; passed to them as a constexpr."""

RADIANS = tl.constexpr(2 * math.pi / (1 << 32))
LOG2_E = tl.constexpr(math.log2(math.e))
HALF_MAX = tl.constexpr(65504.0)

TYPE_NAMES = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32"}


def use_kernel(x: torch.Tensor) -> bool:
    """Whether a wrapper launches its kernel for `x`; otherwise it computes with torch."""
    return x.is_cuda or INTERPRET


@triton.jit
def load_rows(pointer, start, column, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[len(start), BLOCK] elements from each of `start` on; columns from SIZE on are 0. Unmasked if SIZE is BLOCK."""
    at = pointer + (start[:, None] + column[None, :])
    return tl.load(at) if BLOCK == SIZE else tl.load(at, mask=column[None, :] < SIZE, other=0)


@triton.jit
def operand(x, interpret: tl.constexpr):
    """A loaded tile as an operand of arithmetic or tl.dot."""
    if interpret:
        x = x.to(tl.float32)
    return x


@triton.jit
def rounded(x, dtype: tl.constexpr, interpret: tl.constexpr):
    """fp32 tile rounded to `dtype`: of that type when compiled, fp32 with its values when interpreted."""
    if not interpret:
        y = x.to(dtype)
    elif dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        y = bits.to(tl.float32, bitcast=True)
    else:
        y = x.to(dtype).to(tl.float32)
    return y


@triton.jit
def half_precision(x, interpret: tl.constexpr):
    """RoPE features, fp32, as the fp16 operand of a product.

    A rotated bf16 key would be rounded to 8 bits a second time (2.3e-3 in all); fp16 keeps 11 (1.7e-3, as stored).
    Features beyond fp16's range are clamped; no model comes near it.
    """
    x = tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX)
    return rounded(x, tl.float16, interpret)


@triton.jit
def cos_sin_of(delta, turns, interpret: tl.constexpr):
    """cos and sin of delta * turns, the same as `rotation.cos_sin`: the int64 product wraps at a whole turn."""
    angle = ((delta.to(tl.int64) * turns) >> 32).to(tl.int32).to(tl.float32) * RADIANS
    if interpret:
        cos = tl.cos(angle)
        sin = tl.sin(angle)
    else:
        # the hardware's own functions, off by less than 2^-20 within a turn; libdevice's need a stack frame
        cos = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=r,r", [angle], tl.float32, True, 1)
        sin = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=r,r", [angle], tl.float32, True, 1)
    return cos, sin


@triton.jit
def bits_of(x, dtype: tl.constexpr, interpret: tl.constexpr):
    """The 16 bits of x, which `rounded` made, as int32; the upper half may be anything."""
    if interpret:
        if dtype == tl.bfloat16:
            return x.to(tl.int32, bitcast=True) >> 16
        x = x.to(dtype)
    return x.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def from_bits(x, dtype: tl.constexpr, interpret: tl.constexpr):
    """What `bits_of` was made from; x is int32 and its upper half may be anything."""
    if interpret:
        if dtype == tl.bfloat16:
            return (x << 16).to(tl.float32, bitcast=True)
        return x.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return x.to(tl.int16).to(dtype, bitcast=True)
