# mypy: allow-untyped-defs
"""Decode: one query a sequence against rows at any slots, each row moved to its position while it is read.

Absorbed MLA: a row is c_KV (R numbers: key and value, one tile in shared memory serves as both) and k_r (D numbers,
rotated for the row's base position). Row j of a sequence must be rotated by δ = j - base[slot]. A sequence is cut into
splits so that few sequences fill the device; a second kernel merges the splits by their log-sum-exp.

**Where the rotation happens.** R(-δ) q · k = q · R(δ) k, so while δ stays the same the query is rotated once and the
keys not at all. The kernel looks 1,024 rows ahead for the next change of δ; until then the main loop compares a scalar
per tile, loads nothing but slots and rows, and multiplies k_r straight from the asynchronous copy. A tile in which δ
changes has its k_r read again (128 bytes a row, from the L2 cache) and rotated row by row. Instructions of one 64-row
tile at 16 heads, 512 + 64, bf16, 8 warps, sm_90, Triton 3.9.0 (the first two lines: `python -m irminsul_kernels.aot
--kernel decode`; the others were tried and dropped):

    no rotation                                           455
    query side by runs (this kernel)                      500 in a run (+10 %), 857 where δ changes
    key side, exact integer phase and sin/cos.approx      +27 % everywhere
    key side, sines kept from tile to tile                +18 to +21 % in a run
    query side, the tile's one δ found from its rows      +12 %, and a tile of two δ is wrong

Rotating keys costs 15 instructions for each of the 8 pairs of numbers a thread holds; nothing hides them below 12 %.
The rotated query enters as the sum of two bf16 (fp16) numbers, so that rotation adds no rounding: the error of a
moved row is that of having stored it.

Runs on bf16 and fp16, R a power of two from 16 to 512, D 32, 64 or 128; tuned for 512 + 64.
"""

from __future__ import annotations

import math
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from irminsul_kernels.aot import KernelConfig
from irminsul_kernels.rotation import cos_sin, rotate

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""The process runs kernels on the CPU (TRITON_INTERPRET=1)."""
LOOKAHEAD = 1024
MAX_SPLITS = 128
MIN_TILES = 4
"""Tiles of rows that a split is worth at least."""
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Tuning(NamedTuple):
    """How the kernel is launched for one shape."""

    block_h: int
    """Heads a block handles; fewer heads are padded."""
    block_n: int
    """Rows a tile."""
    num_warps: int
    num_stages: int
    pack: bool
    """Hand the rotated query from tile to tile in registers: pays while there is room for it."""


def tuning(heads: int, rank: int, rope_dim: int, arch: int) -> Tuning:
    """Launch parameters; `arch` is the compute capability, 90 for 9.0."""
    block_h = 16  # 32 spill registers; blocks of one sequence run side by side and share its rows in the L2 cache
    # two tiles of rows and the queries have to fit into shared memory: 163 KB on 8.0, 227 KB on 9.0 and 10.0
    block_n = 64 if arch in (90, 100) or rank <= 256 else 32
    # five stages: three levels of indirection (slot, row, use) leave two tiles in flight
    return Tuning(block_h, block_n, 8 if block_n == 64 else 4, 5, block_h == 16)


_LOG2E = tl.constexpr(math.log2(math.e))
_LN2 = tl.constexpr(math.log(2))
_PHASE = tl.constexpr(2 * math.pi / 2**32)
_MIN_TILES = tl.constexpr(MIN_TILES)


@triton.jit
def _cos_sin(delta, turns, INTERPRET: tl.constexpr):
    """cos and sin of delta * turns / 2^64 turns; the int64 product wraps at a whole turn."""
    angle = ((delta.to(tl.int64) * turns) >> 32).to(tl.int32).to(tl.float32) * _PHASE
    if INTERPRET:
        return tl.cos(angle), tl.sin(angle)
    # |angle| <= π, where the approximation is off by at most 2^-20.5; libdevice would cost a stack frame
    c = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1)
    s = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], dtype=tl.float32, is_pure=True, pack=1)
    return c, s


@triton.jit
def _operand(x, INTERPRET: tl.constexpr):
    """x as an operand of tl.dot; the interpreter cannot multiply bf16."""
    if INTERPRET:
        x = x.to(tl.float32)
    return x


@triton.jit
def _round(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 x in `dtype`. The interpreter truncates, so there the rounded value is computed and stays fp32."""
    if INTERPRET:
        if dtype == tl.bfloat16:
            bits = x.to(tl.int32, bitcast=True)
            bits += 0x7FFF + ((bits >> 16) & 1)
            return (bits & -65536).to(tl.float32, bitcast=True)
        return x.to(dtype).to(tl.float32)
    return x.to(dtype)


@triton.jit
def _hidden(x, INTERPRET: tl.constexpr):
    """int32 x whose origin the compiler cannot see: it would make the loop counter 64 bits wide for rare addresses."""
    if INTERPRET:
        return x
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _turned_query(q, turns, delta, h, odd: tl.constexpr, D: tl.constexpr, INTERPRET: tl.constexpr):
    """The even or the odd features of R(-delta) q, fp32 [BLOCK_H, D / 2]."""
    i = 2 * tl.arange(0, D // 2) + odd
    c, s = _cos_sin(delta, tl.load(turns + i % (D // 2)), INTERPRET)
    s = tl.where(i < D // 2, s, -s)
    own = tl.load(q + h[:, None] * D + i[None, :]).to(tl.float32)
    pair = tl.load(q + h[:, None] * D + (i ^ (D // 2))[None, :]).to(tl.float32)
    return own * c[None, :] + pair * s[None, :]


@triton.jit
def _bits(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """The 16 bits of x, which _round made, as int32; the upper half may be anything."""
    if INTERPRET:
        if dtype == tl.bfloat16:
            return x.to(tl.int32, bitcast=True) >> 16
        x = x.to(dtype)
    return x.to(tl.int16, bitcast=True).to(tl.int32)


@triton.jit
def _from_bits(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    if INTERPRET:
        if dtype == tl.bfloat16:
            return (x << 16).to(tl.float32, bitcast=True)
        return x.to(tl.int16).to(dtype, bitcast=True).to(tl.float32)
    return x.to(tl.int16).to(dtype, bitcast=True)


@triton.jit
def _carried(even, odd, dtype: tl.constexpr, PACK: tl.constexpr, INTERPRET: tl.constexpr):
    """[BLOCK_H, D] of its even and odd columns, in the form in which the main loop hands it on (_used undoes it).

    Packed, two neighbours share an int32. That is how a matrix product wants them in registers, so they stay there
    from tile to tile; a 16-bit tensor would go through shared memory in every tile.
    """
    if PACK:  # noqa: SIM108
        x = (_bits(even, dtype, INTERPRET) & 0xFFFF) | (_bits(odd, dtype, INTERPRET) << 16)
    else:
        x = tl.interleave(even, odd)
    return x


@triton.jit
def _used(x, dtype: tl.constexpr, PACK: tl.constexpr, INTERPRET: tl.constexpr):
    if PACK:
        x = tl.interleave(_from_bits(x & 0xFFFF, dtype, INTERPRET), _from_bits(x >> 16, dtype, INTERPRET))
    return x


@triton.jit
def _next_change(slots, base, start, end, AHEAD: tl.constexpr):
    """δ at `start`, and the first position behind it where δ is another (at most AHEAD further on)."""
    ahead = start + tl.arange(0, AHEAD)
    there = ahead < end
    slot = tl.load(slots + ahead, mask=there, other=0)
    delta = ahead - tl.load(base + slot, mask=there, other=0)
    here = tl.sum(tl.where(tl.arange(0, AHEAD) == 0, delta, 0), 0)
    return here, tl.min(tl.where(there & (delta != here), ahead, start + AHEAD), 0)


@triton.jit
def _add_mixed_scores(
    scores, q, rows, base, slots, turns, start, end, h,
    R: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """scores + q · R(δ) k_r of one tile whose rows have several δ. The rotated keys are sums of two `dtype` as well."""
    HALF: tl.constexpr = D // 2
    j = tl.minimum(start + tl.arange(0, BLOCK_N), end - 1)
    slot = tl.load(slots + j, volatile=True)
    delta = j - tl.load(base + slot, volatile=True)
    row = rows + slot.to(tl.int64)[:, None] * (R + D) + R
    dtype: tl.constexpr = rows.dtype.element_ty
    # 16 pairs at a time: fewer registers, whose number counts for the whole kernel
    for first in tl.range(0, HALF, 16, num_stages=2):
        i = first + tl.arange(0, 16)
        c, s = _cos_sin(delta[:, None], tl.load(turns + i, volatile=True)[None, :], INTERPRET)
        k1 = tl.load(row + i[None, :], volatile=True).to(tl.float32)
        k2 = tl.load(row + HALF + i[None, :], volatile=True).to(tl.float32)
        at = q + h[:, None] * D + i[None, :]
        q1 = _round(tl.load(at, volatile=True).to(tl.float32), dtype, INTERPRET)
        q2 = _round(tl.load(at + HALF, volatile=True).to(tl.float32), dtype, INTERPRET)
        turned = k1 * c - k2 * s
        key = _round(turned, dtype, INTERPRET)
        scores = tl.dot(q1, tl.trans(key), scores)
        scores = tl.dot(q1, tl.trans(_round(turned - key.to(tl.float32), dtype, INTERPRET)), scores)
        turned = k2 * c + k1 * s
        key = _round(turned, dtype, INTERPRET)
        scores = tl.dot(q2, tl.trans(key), scores)
        scores = tl.dot(q2, tl.trans(_round(turned - key.to(tl.float32), dtype, INTERPRET)), scores)
    return scores


@triton.jit
def _chunk(length, num_splits, BLOCK_N: tl.constexpr):
    """Rows a split takes: equal shares in whole tiles, at least MIN_TILES of them."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N), _MIN_TILES) * BLOCK_N


@triton.jit
def _decode_kernel(
    q_latent, q_rope, rows, base, slots, kv_indptr, turns, out, lse, scale, heads, num_splits,
    R: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
    PACK: tl.constexpr, ROTATE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """out [num_splits, B, heads, R] and lse [num_splits, B, heads] of grid (head blocks, num_splits, B).

    A split without rows leaves its part untouched, except the first one: that is an empty sequence.
    """
    dtype: tl.constexpr = rows.dtype.element_ty
    block, split, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(kv_indptr + b)
    length = tl.load(kv_indptr + b + 1) - first
    chunk = _chunk(length, num_splits, BLOCK_N)
    begin = split * chunk
    end = tl.minimum(begin + chunk, length)
    h = tl.arange(0, BLOCK_H)
    # padding heads repeat the last one and are not stored
    head = tl.minimum(h, heads - 1 - block * BLOCK_H)
    mask = h == head
    r = tl.arange(0, R)
    i = tl.arange(0, D)
    query = b * heads + block * BLOCK_H
    target = (split * tl.num_programs(2) + b).to(tl.int64) * heads + block * BLOCK_H
    lse += target
    out += target * R
    if begin >= end:
        if split == 0:
            tl.store(lse + h, float("-inf"), mask=mask)
            tl.store(out + h[:, None] * R + r[None, :], 0.0, mask=mask[:, None])
        return
    slots += first
    q_rope += query * D
    latent = tl.load(q_latent + (query + head)[:, None] * R + r[None, :])
    latent = _operand(latent, INTERPRET)
    if ROTATE and PACK:
        rope = tl.zeros([BLOCK_H, D // 2], tl.int32)
    else:
        rope = _round(tl.load(q_rope + head[:, None] * D + i[None, :]).to(tl.float32), dtype, INTERPRET)
    rest = rope
    until = begin
    top = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, R], tl.float32)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        # a tail repeats the last row instead of masking loads: cheaper, and no slot outside the sequence is touched
        slot = tl.load(slots + tl.minimum(j, end - 1))
        row = rows + slot.to(tl.int64)[:, None] * (R + D)
        c_kv = _operand(tl.load(row + r[None, :]), INTERPRET)
        k_r = _operand(tl.load(row + (R + i)[None, :]), INTERPRET)
        scores = tl.dot(latent, tl.trans(c_kv))
        if ROTATE:
            if start + BLOCK_N > until:
                delta, until = _next_change(slots, base, _hidden(start, INTERPRET), end, AHEAD)
                even = _turned_query(q_rope, turns, delta, head, 0, D, INTERPRET)
                odd = _turned_query(q_rope, turns, delta, head, 1, D, INTERPRET)
                even_part, odd_part = _round(even, dtype, INTERPRET), _round(odd, dtype, INTERPRET)
                rope = _carried(even_part, odd_part, dtype, PACK, INTERPRET)
                even_part = _round(even - even_part.to(tl.float32), dtype, INTERPRET)
                odd_part = _round(odd - odd_part.to(tl.float32), dtype, INTERPRET)
                rest = _carried(even_part, odd_part, dtype, PACK, INTERPRET)
            if until < start + BLOCK_N:
                at = _hidden(start, INTERPRET)
                scores = _add_mixed_scores(
                    scores, q_rope, rows, base, slots, turns, at, end, head, R, D, BLOCK_N, INTERPRET
                )
            else:
                scores = tl.dot(_used(rope, dtype, PACK, INTERPRET), tl.trans(k_r), scores)
                scores = tl.dot(_used(rest, dtype, PACK, INTERPRET), tl.trans(k_r), scores)
        else:
            scores = tl.dot(rope, tl.trans(k_r), scores)
        scores = tl.where((j < end)[None, :], scores * (scale * _LOG2E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(_round(weights, dtype, INTERPRET), c_kv, acc * fade[:, None])
        top = new_top
    tl.store(lse + h, (top + tl.log2(total)) * _LN2, mask=mask)
    tl.store(out + h[:, None] * R + r[None, :], acc / total[:, None], mask=mask[:, None])


@triton.jit
def _merge_kernel(
    part, part_lse, kv_indptr, out, lse, heads, num_splits,
    R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Sum of the splits that have rows, weighted by their log-sum-exp; grid (heads, B)."""
    head, b = tl.program_id(0), tl.program_id(1)
    length = tl.load(kv_indptr + b + 1) - tl.load(kv_indptr + b)
    used = tl.cdiv(length, _chunk(length, num_splits, BLOCK_N))
    r = tl.arange(0, R)
    step = (tl.num_programs(1) * heads).to(tl.int64)
    row = b * heads + head
    top = tl.load(part_lse + row)
    total = 1.0
    acc = tl.load(part + row.to(tl.int64) * R + r)
    for split in range(1, used):
        at = split * step + row
        value = tl.load(part_lse + at)
        new_top = tl.maximum(top, value)
        fade, weight = tl.exp(top - new_top), tl.exp(value - new_top)
        acc = acc * fade + tl.load(part + at * R + r) * weight
        total = total * fade + weight
        top = new_top
    tl.store(lse + row, top + tl.log(total))
    tl.store(out + row.to(tl.int64) * R + r, acc / total)


def plan_splits(batch: int, heads: int, max_length: int, num_sms: int, tune: Tuning) -> int:
    """Splits a sequence for which the last wave of blocks is fullest, counting each split's start as two tiles.

    Args:
        max_length: longest sequence of the batch (or of the bucket that a CUDA graph serves).
        num_sms: multiprocessors; one block runs on each.
    """
    blocks = max(1, batch) * -(-heads // tune.block_h)
    tiles = max(1, -(-max_length // tune.block_n))

    def time(splits: int) -> int:
        return -(-blocks * splits // num_sms) * (-(-tiles // splits) + 2)

    return min(range(1, min(MAX_SPLITS, max(1, tiles // MIN_TILES)) + 1), key=time)


def workspace_size(batch: int, heads: int, rank: int, num_splits: int) -> int:
    """float32 numbers that :func:`decode_attention` needs as `workspace`; none with one split."""
    return num_splits * batch * heads * (rank + 1) if num_splits > 1 else 0


def decode_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    base: Tensor,
    slots: Tensor,
    kv_indptr: Tensor,
    turns: Tensor,
    scale: float,
    *,
    max_length: int,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    num_splits: int | None = None,
    check: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of one query a sequence over all rows of its sequence.

    On CUDA the kernel runs; on the CPU :func:`decode_reference`. Nothing is read back from the device and, with `out`,
    `lse`, `workspace` and `num_splits` given, nothing is allocated: the call can be captured in a CUDA graph, and the
    graph serves any later contents of its tensors. A sequence without rows gives zeros and a log-sum-exp of -inf.

    Args:
        q_latent: [B, H, R] queries in latent space (q_nope @ w_uk), bf16 or fp16.
        q_rope: [B, H, D] queries rotated for their positions, q_latent's dtype or float32.
        rows: [capacity, R + D], one layer of the pool, q_latent's dtype.
        base: int32 [capacity], the position each row was rotated for.
        slots: int32 [sum of lengths or more]; slots[kv_indptr[b] + j] holds row j of sequence b.
        kv_indptr: int32 [B + 1], ascending.
        turns: int64 [D / 2], from :func:`irminsul_kernels.turns_per_position`.
        scale: softmax scale.
        max_length: bound of the sequence lengths, known to the host. Longer sequences are still computed right, with
            splits that fit them less.
        out: [B, H, R] float32, bf16 or fp16 to write to; a new one has q_latent's dtype.
        lse: float32 [B, H] to write natural log-sum-exps to.
        workspace: float32 [at least workspace_size(...)].
        num_splits: from :func:`plan_splits`; left out, it is planned here from the device's multiprocessors.
        check: also compare slots and kv_indptr with the pool. This waits for the device.

    Returns:
        out and lse.

    Raises:
        ValueError: the argument, its value, and what is allowed.
    """
    _validate(q_latent, q_rope, rows, base, slots, kv_indptr, turns, max_length, out, lse, workspace, num_splits)
    if check:
        check_slots(slots, kv_indptr, len(rows), max_length)
    batch, heads, rank = q_latent.shape
    out = torch.empty_like(q_latent) if out is None else out
    lse = q_latent.new_empty(batch, heads, dtype=torch.float32) if lse is None else lse
    if not (rows.is_cuda or INTERPRETED):
        result, result_lse = decode_reference(q_latent, q_rope, rows, base, slots, kv_indptr, turns, scale)
        return out.copy_(result), lse.copy_(result_lse)
    if batch == 0:
        return out, lse
    arch, num_sms = _device(rows.device)
    rope_dim = q_rope.shape[2]
    tune = tuning(heads, rank, rope_dim, arch)
    splits = plan_splits(batch, heads, max_length, num_sms, tune) if num_splits is None else num_splits
    part, part_lse = out, lse
    if splits > 1:
        if workspace is None:
            workspace = rows.new_empty(workspace_size(batch, heads, rank, splits), dtype=torch.float32)
        numbers = splits * batch * heads
        part, part_lse = workspace[: numbers * rank], workspace[numbers * rank :]
    grid = (-(-heads // tune.block_h), splits, batch)
    _decode_kernel[grid](
        q_latent, q_rope, rows, base, slots, kv_indptr, turns, part, part_lse, scale, heads, splits,
        R=rank, D=rope_dim, BLOCK_H=tune.block_h, BLOCK_N=tune.block_n, AHEAD=LOOKAHEAD, PACK=tune.pack,
        ROTATE=True,
        INTERPRET=INTERPRETED, num_warps=tune.num_warps, num_stages=tune.num_stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(heads, batch)](
            part, part_lse, kv_indptr, out, lse, heads, splits, R=rank, BLOCK_N=tune.block_n, num_warps=4
        )
    return out, lse


@lru_cache
def _device(device: torch.device) -> tuple[int, int]:
    """Compute capability and multiprocessors; the interpreter plays an H200."""
    if device.type != "cuda":
        return 90, 132
    properties = torch.cuda.get_device_properties(device)
    return 10 * properties.major + properties.minor, properties.multi_processor_count


def _validate(
    q_latent: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    base: Tensor,
    slots: Tensor,
    kv_indptr: Tensor,
    turns: Tensor,
    max_length: int,
    out: Tensor | None,
    lse: Tensor | None,
    workspace: Tensor | None,
    num_splits: int | None,
) -> None:
    if q_latent.dim() != 3:
        raise ValueError(f"q_latent {tuple(q_latent.shape)} must be [batch, heads, rank]")
    batch, heads, rank = q_latent.shape
    rope_dim = q_rope.shape[-1]
    shapes: list[tuple[str, Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]]] = [
        ("q_latent", q_latent, (batch, heads, rank), (torch.bfloat16, torch.float16)),
        ("q_rope", q_rope, (batch, heads, rope_dim), (q_latent.dtype, torch.float32)),
        ("rows", rows, (rows.shape[0], rank + rope_dim), (q_latent.dtype,)),
        ("base", base, (rows.shape[0],), (torch.int32,)),
        ("slots", slots, (slots.shape[0] if slots.dim() else 0,), (torch.int32,)),
        ("kv_indptr", kv_indptr, (batch + 1,), (torch.int32,)),
        ("turns", turns, (rope_dim // 2,), (torch.int64,)),
        ("out", out, (batch, heads, rank), (torch.float32, torch.bfloat16, torch.float16)),
        ("lse", lse, (batch, heads), (torch.float32,)),
        ("workspace", workspace, (workspace.numel(),) if workspace is not None else (), (torch.float32,)),
    ]
    for name, tensor, shape, dtypes in shapes:
        if tensor is None:
            continue
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, the other arguments ask for {shape}")
        if tensor.dtype not in dtypes:
            raise ValueError(f"{name} is {tensor.dtype}; allowed: {', '.join(map(str, dtypes))}")
        if tensor.device != rows.device:
            raise ValueError(f"{name} is on {tensor.device}, rows on {rows.device}; move one of them")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; make it contiguous")
    if not 1 <= heads <= 128:
        raise ValueError(f"q_latent has {heads} heads; 1 to 128 have a configuration")
    if rank not in (16, 32, 64, 128, 256, 512) or rope_dim not in (32, 64, 128):
        raise ValueError(
            f"rows of {rank} + {rope_dim} have no configuration: rank must be a power of two from 16 to 512, "
            "the RoPE part 32, 64 or 128; use mla_attention"
        )
    if max_length < 0:
        raise ValueError(f"max_length is {max_length}; a length is at least 0")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}; 1 to {MAX_SPLITS}")
    if workspace is not None:
        needed = workspace_size(batch, heads, rank, num_splits or 1)
        if num_splits is None:
            raise ValueError("workspace without num_splits: plan the splits first, they decide its size")
        if workspace.numel() < needed:
            raise ValueError(f"workspace holds {workspace.numel()} numbers; {num_splits} splits need {needed}")


def check_slots(slots: Tensor, kv_indptr: Tensor, capacity: int, max_length: int) -> None:
    """Look at the contents of a batch's description. For tensors on a device this waits for the device.

    Raises:
        ValueError: a negative length, one above max_length, more rows than slots, a slot outside the pool.
    """
    indptr = kv_indptr.cpu()
    lengths = indptr.diff()
    if indptr[0] < 0 or (lengths < 0).any():
        raise ValueError(f"kv_indptr must ascend from 0 or more, not {indptr.tolist()[:9]}...")
    if len(lengths) and lengths.max() > max_length:
        raise ValueError(f"kv_indptr has a sequence of {lengths.max()} rows; max_length is {max_length}")
    if indptr[-1] > len(slots):
        raise ValueError(f"kv_indptr ends at {indptr[-1]}; slots holds {len(slots)}")
    used = slots[int(indptr[0]) : int(indptr[-1])]
    if len(used) and not 0 <= int(used.min()) <= int(used.max()) < capacity:
        raise ValueError(f"slots {int(used.min())}..{int(used.max())} leave the pool of {capacity}")


def decode_reference(
    q_latent: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    base: Tensor,
    slots: Tensor,
    kv_indptr: Tensor,
    turns: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """What the kernel computes, in torch and float32, any device: out [B, H, R] and lse [B, H], both float32."""
    batch, heads, rank = q_latent.shape
    out = q_latent.new_zeros(batch, heads, rank, dtype=torch.float32)
    lse = q_latent.new_full((batch, heads), float("-inf"), dtype=torch.float32)
    bounds = kv_indptr.tolist()
    for b, (begin, end) in enumerate(pairwise(bounds)):
        if begin == end:
            continue
        slot = slots[begin:end].long()
        found = rows[slot].float()
        delta = torch.arange(end - begin, device=rows.device) - base[slot]
        c_kv, k_r = found[:, :rank], rotate(found[:, rank:], *cos_sin(delta, turns))
        scores = (q_latent[b].float() @ c_kv.T + q_rope[b].float() @ k_r.T) * scale
        lse[b] = torch.logsumexp(scores, dim=-1)
        out[b] = torch.softmax(scores, dim=-1) @ c_kv
    return out, lse


def aot_configs(arch: int) -> list[KernelConfig]:
    """A block of 16 heads (more heads are more blocks): the tuned shape, a generic one, and the merge."""
    pointers = dict(base="*i32", slots="*i32", kv_indptr="*i32", turns="*i64", out="*fp32", lse="*fp32")
    scalars = dict(scale="fp32", heads="i32", num_splits="i32")
    configs = []
    for heads, rank, rope_dim, dtype in (
        (16, 512, 64, "bf16"),
        (16, 512, 64, "fp16"),
        (16, 256, 32, "bf16"),
    ):
        tune = tuning(heads, rank, rope_dim, arch)
        data = dict.fromkeys(("q_latent", "q_rope", "rows"), f"*{dtype}") | pointers
        constexprs: dict[str, Any] = dict(
            R=rank,
            D=rope_dim,
            BLOCK_H=tune.block_h,
            BLOCK_N=tune.block_n,
            AHEAD=LOOKAHEAD,
            PACK=tune.pack,
            ROTATE=True,
            INTERPRET=False,
        )
        configs.append(
            KernelConfig(
                f"decode, {heads} heads, {rank} + {rope_dim}, {dtype}",
                _decode_kernel,
                data | scalars,
                constexprs,
                tune.num_warps,
                tune.num_stages,
                aligned=tuple(data),
                unrotated=dict(ROTATE=False),
            )
        )
    merge = dict(part="*fp32", part_lse="*fp32", kv_indptr="*i32", out="*bf16", lse="*fp32")
    configs.append(
        KernelConfig(
            "decode merge, 512",
            _merge_kernel,
            merge | dict(heads="i32", num_splits="i32"),
            dict(R=512, BLOCK_N=64),
            num_warps=4,
            num_stages=3,
            aligned=tuple(merge),
        )
    )
    return configs
