"""RMSNorm, and writing a new token's row to the pool: RMSNorm of c_KV and rotation of k_r in one pass.

Bytes moved by `rms_norm`: 2 * size * itemsize per token plus the weight once. By `write_rows`: 2 * (R + d) * itemsize
per token plus 4 d for cosines and sines and 4 for the slot. Both are minimal: each element is moved once.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from irminsul_kernels.device import next_power_of_two
from irminsul_kernels.device_math import INTERPRET, TYPE_NAMES, rounded, use_kernel
from irminsul_kernels.launch import KernelConfig
from irminsul_kernels.ops.rotation import rotate

MAX_SIZE = 32768
"""Largest size of a normalised vector; one program holds it in registers."""


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The same as :func:`rms_norm`, in torch: in float32 (float64 for float64), rounded once."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    return (y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + eps) * weight.to(wide)).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) * weight over the last dimension.

    Args:
        x: [T, size], bf16, fp16 or fp32; any stride between rows (a slice of a wider tensor), 1 within a row.
        weight: [size], dtype of x.

    Returns:
        [T, size] contiguous, dtype of x.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    _check_norm(x, weight)
    if not use_kernel(x):
        return rms_norm_reference(x, weight, eps)
    tokens, size = x.shape
    out = torch.empty(tokens, size, dtype=x.dtype, device=x.device)
    if tokens:
        block = next_power_of_two(size)
        rms_norm_kernel[(tokens,)](
            x, weight, out, x.stride(0), eps, SIZE=size, BLOCK=block, INTERPRET=INTERPRET, num_warps=_warps(block)
        )
    return out


def write_rows_reference(
    kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, rows: Tensor, eps: float
) -> None:
    """The same as :func:`write_rows`, in torch."""
    latent, key = kv.split((weight.shape[0], 2 * cos.shape[1]), dim=1)
    rows[slots.long()] = torch.cat((rms_norm_reference(latent, weight, eps), rotate(key, cos, sin).to(kv.dtype)), dim=1)


def write_rows(kv: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, rows: Tensor, eps: float) -> None:
    """Normalise c_KV, rotate k_r and write both to the tokens' slots. Nothing else of the pool is touched.

    Args:
        kv: [T, R + d], output of the kv_a projection, bf16, fp16 or fp32; any stride between rows.
        weight: [R], of kv_a_layernorm.
        cos, sin: float32 [T, d/2] of the tokens' positions, attention factor included.
        slots: int32 or int64 [T], distinct. Not checked against the pool here: that would wait for the device.
        rows: [capacity, R + d] contiguous, dtype of kv; one layer of the pool.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    rank, half = weight.shape[0], cos.shape[-1]
    _check_norm(kv[:, :rank], weight)
    if kv.shape[1] != rank + 2 * half or rows.dim() != 2 or rows.shape[1] != kv.shape[1]:
        raise ValueError(
            f"kv {tuple(kv.shape)} and rows {tuple(rows.shape)} must be R + d = {rank} + {2 * half} wide "
            "(R from weight, d/2 from cos)"
        )
    if rows.dtype != kv.dtype or not rows.is_contiguous():
        raise ValueError(f"rows are {rows.dtype} with strides {rows.stride()}; they must be contiguous {kv.dtype}")
    for name, table in (("cos", cos), ("sin", sin)):
        if table.shape != (kv.shape[0], half) or table.dtype != torch.float32 or not table.is_contiguous():
            raise ValueError(
                f"{name} is {table.dtype} {tuple(table.shape)}; it must be contiguous float32 {(kv.shape[0], half)}"
            )
    if slots.shape != kv.shape[:1] or slots.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"slots are {slots.dtype} {tuple(slots.shape)}; they must be int32 or int64 ({kv.shape[0]},)")
    if {cos.device, sin.device, slots.device, rows.device} != {kv.device}:
        raise ValueError(
            f"kv is on {kv.device}, cos on {cos.device}, sin on {sin.device}, slots on {slots.device}, rows on "
            f"{rows.device}; all must be on one device"
        )
    if not use_kernel(kv):
        write_rows_reference(kv, weight, cos, sin, slots, rows, eps)
    elif kv.shape[0]:
        block = next_power_of_two(rank)
        write_rows_kernel[(kv.shape[0],)](
            kv, weight, cos, sin, slots, rows, kv.stride(0), eps,
            RANK=rank, HALF=half, BLOCK_RANK=block, BLOCK_HALF=next_power_of_two(half), INTERPRET=INTERPRET,
            num_warps=_warps(block),
        )  # fmt: skip


def _check_norm(x: Tensor, weight: Tensor) -> None:
    if x.dim() != 2 or weight.shape != x.shape[1:]:
        raise ValueError(f"x {tuple(x.shape)} and weight {tuple(weight.shape)} must be [T, size] and [size]")
    if not 0 < x.shape[1] <= MAX_SIZE:
        raise ValueError(f"x has vectors of {x.shape[1]} numbers; 1 to {MAX_SIZE} can be normalised")
    if x.dtype not in TYPE_NAMES or weight.dtype != x.dtype:
        raise ValueError(f"x is {x.dtype}, weight {weight.dtype}; both must be one of bfloat16, float16, float32")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError(f"x has strides {x.stride()}, weight {weight.stride()}; the last stride must be 1")
    if weight.device != x.device:
        raise ValueError(f"x is on {x.device}, weight on {weight.device}; both must be on one device")


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


@triton.jit
def rms_norm_kernel(x, weight, out, stride, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, INTERPRET: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    y = _normalised(x + token * stride, weight, eps, i, SIZE)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(out + token * SIZE + i, rounded(y, dtype, INTERPRET).to(dtype), mask=i < SIZE)


@triton.jit
def _normalised(x, weight, eps, i, SIZE: tl.constexpr):
    value = tl.load(x + i, mask=i < SIZE, other=0).to(tl.float32)
    factor = tl.load(weight + i, mask=i < SIZE, other=0).to(tl.float32)
    return value * (1 / tl.sqrt(tl.sum(value * value) / SIZE + eps)) * factor


@triton.jit
def write_rows_kernel(
    kv, weight, cos, sin, slots, rows, stride, eps,
    RANK: tl.constexpr, HALF: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
    INTERPRET: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    source = kv + token * stride
    row = rows + tl.load(slots + token).to(tl.int64) * (RANK + 2 * HALF)
    dtype: tl.constexpr = rows.dtype.element_ty
    i = tl.arange(0, BLOCK_RANK)
    latent = _normalised(source, weight, eps, i, RANK)
    tl.store(row + i, rounded(latent, dtype, INTERPRET).to(dtype), mask=i < RANK)
    j = tl.arange(0, BLOCK_HALF)
    low = tl.load(source + RANK + j, mask=j < HALF, other=0).to(tl.float32)
    high = tl.load(source + RANK + HALF + j, mask=j < HALF, other=0).to(tl.float32)
    c = tl.load(cos + token * HALF + j, mask=j < HALF, other=0)
    s = tl.load(sin + token * HALF + j, mask=j < HALF, other=0)
    tl.store(row + RANK + j, rounded(low * c - high * s, dtype, INTERPRET).to(dtype), mask=j < HALF)
    tl.store(row + RANK + HALF + j, rounded(high * c + low * s, dtype, INTERPRET).to(dtype), mask=j < HALF)


def aot_configs(arch: int) -> list[KernelConfig]:
    """Hidden sizes of V2-Lite and V3, and rows of 512 + 64; bf16, the same on every architecture."""
    bf16: dict[str, Any] = dict(x="*bf16", weight="*bf16", out="*bf16", stride="i32", eps="fp32")
    configs = [
        KernelConfig(
            f"RMSNorm of {size}, bf16", rms_norm_kernel, bf16, dict(SIZE=size, BLOCK=block, INTERPRET=False),
            _warps(block), 1, ("x", "weight", "out", "stride"),
        )
        for size, block in ((2048, 2048), (7168, 8192))
    ]  # fmt: skip
    signature: dict[str, Any] = dict(
        kv="*bf16", weight="*bf16", cos="*fp32", sin="*fp32", slots="*i32", rows="*bf16", stride="i32", eps="fp32"
    )
    constexprs = dict(RANK=512, HALF=32, BLOCK_RANK=512, BLOCK_HALF=32, INTERPRET=False)
    aligned = ("kv", "weight", "cos", "sin", "slots", "rows", "stride")
    configs.append(
        KernelConfig("write rows, 512 + 64, bf16", write_rows_kernel, signature, constexprs, _warps(512), 1, aligned)
    )
    return configs
