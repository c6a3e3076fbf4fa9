# mypy: allow-untyped-defs
"""Decode attention: one query per sequence over rows at any slots, each rotated to its position as it is read.

Absorbed MLA: a row is c_KV (R numbers: key and value, one tile in shared memory serves as both) and k_r (D numbers,
rotated for the row's base position). Row j of a sequence must be rotated by δ = j - base[slot]. A sequence is cut into
splits so that few sequences fill the device; a second kernel merges the splits by their log-sum-exp.

**Where the rotation happens.** R(-δ) q · k = q · R(δ) k, so while δ stays the same the query is rotated once and the
keys not at all. The kernel looks 1,024 rows ahead for the next change of δ; until then the main loop compares a scalar
per tile, loads nothing but slots and rows, and multiplies k_r straight from the asynchronous copy. A tile in which δ
changes has its k_r read again (128 bytes per row, from the L2 cache) and rotated row by row. Instructions of one 64-row
tile at 16 heads, 512 + 64, bf16, 8 warps, sm_90, Triton 3.9.0 (the others were tried and dropped):

    no rotation                                           455
    query side by runs (this kernel)                      500 in a run (+10 %), 857 where δ changes
    key side, exact integer phase and sin/cos.approx      +27 % everywhere
    key side, sines kept from tile to tile                +18 to +21 % in a run
    query side, the tile's one δ found from its rows      +12 %, and a tile of two δ is wrong

Rotating keys costs 15 instructions for each of the 8 pairs of features that a thread holds; nothing hides them
below 12 %.
The rotated query enters as the sum of two bf16 (fp16) numbers, so that rotation adds no rounding: the error of a
moved row is that of having stored it.

Runs on bf16 and fp16, R a power of two from 16 to 512, D 32, 64 or 128; tuned for 512 + 64.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from irminsul_kernels.attention.plans import MAX_SPLITS, MIN_TILES, DecodeTuning, plan_splits, workspace_size
from irminsul_kernels.checks import check_slots, check_tensors, sizes
from irminsul_kernels.device import architecture, multiprocessors
from irminsul_kernels.device_math import INTERPRET, LOG2_E, bits_of, cos_sin_of, from_bits, operand, rounded, use_kernel
from irminsul_kernels.launch import KernelConfig
from irminsul_kernels.ops.rotation import cos_sin, rotate

MAX_HEADS = 128
RANKS = (16, 32, 64, 128, 256, 512)
ROPE_DIMS = (32, 64, 128)
DTYPES = (torch.bfloat16, torch.float16)
LOOKAHEAD = 1024
"""Rows searched at a time for the next change of δ."""


def tuning(rank: int, arch: int) -> DecodeTuning:
    """Launch parameters; `arch` is the compute capability, 90 for 9.0."""
    block_h = 16  # 32 spill registers; blocks of one sequence run side by side and share its rows in the L2 cache
    # two tiles of rows and the queries have to fit into shared memory: 163 KB on 8.0, 227 KB on 9.0 and 10.0
    block_n = 64 if arch in (90, 100) or rank <= 256 else 32
    # five stages: three levels of indirection (slot, row, use) leave two tiles in flight
    return DecodeTuning(block_h, block_n, 8 if block_n == 64 else 4, 5)


_LN2 = tl.constexpr(math.log(2))
_MIN_TILES = tl.constexpr(MIN_TILES)


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
    c, s = cos_sin_of(delta, tl.load(turns + i % (D // 2)), INTERPRET)
    s = tl.where(i < D // 2, s, -s)
    own = tl.load(q + h[:, None] * D + i[None, :]).to(tl.float32)
    pair = tl.load(q + h[:, None] * D + (i ^ (D // 2))[None, :]).to(tl.float32)
    return own * c[None, :] + pair * s[None, :]


@triton.jit
def _carried(even, odd, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    """[BLOCK_H, D] of its even and odd columns, in the form in which the main loop hands it on (_used undoes it).

    Two neighbours share an int32. That is how a matrix product wants them in registers, so they stay there from tile
    to tile; a 16-bit tensor would go through shared memory in every tile.
    """
    return (bits_of(even, dtype, INTERPRET) & 0xFFFF) | (bits_of(odd, dtype, INTERPRET) << 16)


@triton.jit
def _used(x, dtype: tl.constexpr, INTERPRET: tl.constexpr):
    return tl.interleave(from_bits(x & 0xFFFF, dtype, INTERPRET), from_bits(x >> 16, dtype, INTERPRET))


@triton.jit
def _next_change(slots, base, start, end, AHEAD: tl.constexpr):
    """δ at `start`, and the first position after it where δ differs (at most AHEAD further on)."""
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
        c, s = cos_sin_of(delta[:, None], tl.load(turns + i, volatile=True)[None, :], INTERPRET)
        k1 = tl.load(row + i[None, :], volatile=True).to(tl.float32)
        k2 = tl.load(row + HALF + i[None, :], volatile=True).to(tl.float32)
        at = q + h[:, None] * D + i[None, :]
        q1 = rounded(tl.load(at, volatile=True).to(tl.float32), dtype, INTERPRET)
        q2 = rounded(tl.load(at + HALF, volatile=True).to(tl.float32), dtype, INTERPRET)
        turned = k1 * c - k2 * s
        key = rounded(turned, dtype, INTERPRET)
        scores = tl.dot(q1, tl.trans(key), scores)
        scores = tl.dot(q1, tl.trans(rounded(turned - key.to(tl.float32), dtype, INTERPRET)), scores)
        turned = k2 * c + k1 * s
        key = rounded(turned, dtype, INTERPRET)
        scores = tl.dot(q2, tl.trans(key), scores)
        scores = tl.dot(q2, tl.trans(rounded(turned - key.to(tl.float32), dtype, INTERPRET)), scores)
    return scores


@triton.jit
def _chunk(length, num_splits, BLOCK_N: tl.constexpr):
    """Rows per split: equal shares in whole tiles, at least MIN_TILES tiles."""
    return tl.maximum(tl.cdiv(tl.cdiv(length, num_splits), BLOCK_N), _MIN_TILES) * BLOCK_N


@triton.jit
def _decode_kernel(
    q_latent, q_rope, rows, base, slots, kv_indptr, turns, out, lse, scale, heads, num_splits,
    R: tl.constexpr, D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, AHEAD: tl.constexpr,
    ROTATE: tl.constexpr, INTERPRET: tl.constexpr,
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
    latent = operand(latent, INTERPRET)
    if ROTATE:
        rope = tl.zeros([BLOCK_H, D // 2], tl.int32)
    else:
        rope = rounded(tl.load(q_rope + head[:, None] * D + i[None, :]).to(tl.float32), dtype, INTERPRET)
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
        c_kv = operand(tl.load(row + r[None, :]), INTERPRET)
        k_r = operand(tl.load(row + (R + i)[None, :]), INTERPRET)
        scores = tl.dot(latent, tl.trans(c_kv))
        if ROTATE:
            if start + BLOCK_N > until:
                delta, until = _next_change(slots, base, _hidden(start, INTERPRET), end, AHEAD)
                even = _turned_query(q_rope, turns, delta, head, 0, D, INTERPRET)
                odd = _turned_query(q_rope, turns, delta, head, 1, D, INTERPRET)
                even_part, odd_part = rounded(even, dtype, INTERPRET), rounded(odd, dtype, INTERPRET)
                rope = _carried(even_part, odd_part, dtype, INTERPRET)
                even_part = rounded(even - even_part.to(tl.float32), dtype, INTERPRET)
                odd_part = rounded(odd - odd_part.to(tl.float32), dtype, INTERPRET)
                rest = _carried(even_part, odd_part, dtype, INTERPRET)
            if until < start + BLOCK_N:
                at = _hidden(start, INTERPRET)
                scores = _add_mixed_scores(
                    scores, q_rope, rows, base, slots, turns, at, end, head, R, D, BLOCK_N, INTERPRET
                )
            else:
                scores = tl.dot(_used(rope, dtype, INTERPRET), tl.trans(k_r), scores)
                scores = tl.dot(_used(rest, dtype, INTERPRET), tl.trans(k_r), scores)
        else:
            scores = tl.dot(rope, tl.trans(k_r), scores)
        scores = tl.where((j < end)[None, :], scores * (scale * LOG2_E), float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp2(scores - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(rounded(weights, dtype, INTERPRET), c_kv, acc * fade[:, None])
        top = new_top
    tl.store(lse + h, (top + tl.log2(total)) * _LN2, mask=mask)
    tl.store(out + h[:, None] * R + r[None, :], acc / total[:, None], mask=mask[:, None])


@triton.jit
def _merge_kernel(part, part_lse, kv_indptr, out, lse, heads, num_splits, R: tl.constexpr, BLOCK_N: tl.constexpr):
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
    """Attention of one query per sequence over all rows of its sequence.

    Runs the kernel on CUDA, :func:`decode_reference` on the CPU. Nothing is read back from the device and, with `out`,
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
        max_length: upper bound of the sequence lengths, known to the host. Longer sequences are still computed
            correctly, with splits chosen for shorter ones.
        out: [B, H, R] float32, bf16 or fp16, written to; by default a new tensor of q_latent's dtype.
        lse: float32 [B, H], the natural log-sum-exps are written to it.
        workspace: float32 [at least workspace_size(...)].
        num_splits: from :func:`plan_splits`; by default planned here for the device's multiprocessors.
        check: also compare slots and kv_indptr with the pool. This waits for the device.

    Returns:
        out and lse.

    Raises:
        ValueError: an argument is not as described above; the message names it, its value and what is allowed.
    """
    batch, heads, rank = sizes("q_latent", q_latent, "batch", "heads", "rank")
    _, _, rope_dim = sizes("q_rope", q_rope, "batch", "heads", "rope_dim")
    capacity, _ = sizes("rows", rows, "capacity", "rank + rope_dim")
    check_tensors(
        rows.device,
        ("q_latent", q_latent, DTYPES, (batch, heads, rank)),
        ("q_rope", q_rope, (q_latent.dtype, torch.float32), (batch, heads, rope_dim)),
        ("rows", rows, q_latent.dtype, (capacity, rank + rope_dim)),
        ("base", base, torch.int32, (capacity,)),
        ("slots", slots, torch.int32, (slots.numel(),)),
        ("kv_indptr", kv_indptr, torch.int32, (batch + 1,)),
        ("turns", turns, torch.int64, (rope_dim // 2,)),
        ("out", out, (torch.float32, *DTYPES), (batch, heads, rank)),
        ("lse", lse, torch.float32, (batch, heads)),
        ("workspace", workspace, torch.float32, (0 if workspace is None else workspace.numel(),)),
    )
    if not supports(heads, rank, rope_dim, q_latent.dtype):
        raise ValueError(
            f"{heads} heads and rows of {rank} + {rope_dim} have no configuration: 1 to {MAX_HEADS} heads, a rank of "
            f"{', '.join(map(str, RANKS))} and a RoPE part of {', '.join(map(str, ROPE_DIMS))} have; use mla_attention"
        )
    _check_splits(max_length, num_splits, workspace, workspace_size(batch, heads, rank, num_splits or 1))
    if check:
        check_slots(slots, kv_indptr, len(rows), max_length)
    out = torch.empty_like(q_latent) if out is None else out
    lse = q_latent.new_empty(batch, heads, dtype=torch.float32) if lse is None else lse
    if not use_kernel(rows):
        result, result_lse = decode_reference(q_latent, q_rope, rows, base, slots, kv_indptr, turns, scale)
        return out.copy_(result), lse.copy_(result_lse)
    if batch == 0:
        return out, lse
    tune = tuning(rank, architecture(rows.device))
    splits = num_splits or plan_splits(batch, heads, max_length, multiprocessors(rows.device), tune)
    part, part_lse = out, lse
    if splits > 1:
        if workspace is None:
            workspace = rows.new_empty(workspace_size(batch, heads, rank, splits), dtype=torch.float32)
        numbers = splits * batch * heads
        part, part_lse = workspace[: numbers * rank], workspace[numbers * rank :]
    grid = (-(-heads // tune.block_h), splits, batch)
    _decode_kernel[grid](
        q_latent, q_rope, rows, base, slots, kv_indptr, turns, part, part_lse, scale, heads, splits,
        R=rank, D=rope_dim, BLOCK_H=tune.block_h, BLOCK_N=tune.block_n, AHEAD=LOOKAHEAD, ROTATE=True,
        INTERPRET=INTERPRET, num_warps=tune.num_warps, num_stages=tune.num_stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(heads, batch)](
            part, part_lse, kv_indptr, out, lse, heads, splits, R=rank, BLOCK_N=tune.block_n, num_warps=4
        )
    return out, lse


def supports(heads: int, rank: int, rope_dim: int, dtype: torch.dtype) -> bool:
    """Whether there is a configuration for this shape, so that :func:`decode_attention` takes it."""
    return 1 <= heads <= MAX_HEADS and rank in RANKS and rope_dim in ROPE_DIMS and dtype in DTYPES


def _check_splits(max_length: int, num_splits: int | None, workspace: Tensor | None, needed: int) -> None:
    if max_length < 0:
        raise ValueError(f"max_length is {max_length}; a length is at least 0")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits is {num_splits}; 1 to {MAX_SPLITS}")
    if workspace is not None:
        if num_splits is None:
            raise ValueError("workspace without num_splits: plan the splits first, they decide its size")
        if workspace.numel() < needed:
            raise ValueError(f"workspace holds {workspace.numel()} numbers; {num_splits} splits need {needed}")


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
    for b, (begin, end) in enumerate(pairwise(kv_indptr.tolist())):
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
    for heads, rank, rope_dim, dtype in ((16, 512, 64, "bf16"), (16, 512, 64, "fp16"), (16, 256, 32, "bf16")):
        tune = tuning(rank, arch)
        data = dict.fromkeys(("q_latent", "q_rope", "rows"), f"*{dtype}") | pointers
        constexprs: dict[str, Any] = dict(
            R=rank, D=rope_dim, BLOCK_H=tune.block_h, BLOCK_N=tune.block_n, AHEAD=LOOKAHEAD, ROTATE=True,
            INTERPRET=False,
        )  # fmt: skip
        name = f"decode, {heads} heads, {rank} + {rope_dim}, {dtype}"
        configs.append(
            KernelConfig(
                name, _decode_kernel, data | scalars, constexprs, tune.num_warps, tune.num_stages, tuple(data),
                dict(ROTATE=False),
            )
        )  # fmt: skip
    merge = dict(part="*fp32", part_lse="*fp32", kv_indptr="*i32", out="*bf16", lse="*fp32")
    scalars = dict(heads="i32", num_splits="i32")
    configs.append(
        KernelConfig("decode merge, 512", _merge_kernel, merge | scalars, dict(R=512, BLOCK_N=64), 4, 3, tuple(merge))
    )
    return configs
