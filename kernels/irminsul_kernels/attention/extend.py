# mypy: allow-untyped-defs
"""Absorbed MLA attention of several new tokens per sequence, at any ascending positions.

For short extends and for holes of a prefill that are too small for the expanded form.

Queries are in latent space, so all heads share one key and value per token: a tile holds 128 (token, head) pairs of one
sequence and walks over the keys at or before its last token. The plan, made on the host once per forward pass, says
which tokens share a tile and cuts long walks into pieces where tiles alone would not fill the device; pieces are merged
by their log-sum-exp. Tokens are put into tiles from the last one backwards, which makes the walks as short as they get.

Two programs share a tile: both compute its scores, each mixes one half of c_KV. 128 pairs by 512 numbers of output do
not fit one program's registers, and with 64 pairs the two warpgroups compute the same scores anyway; this way there are
no spills, no layout conversion of the weights, and half the instructions per pair.

A row is read once per program, its c_KV serves as key and as value, and k_r is rotated by δ = position - base on the
way. The rotation is on the key's side: a tile has 128 (token, head) pairs and only 32 keys, so turning the queries
would cost four times as much, and δ may differ from row to row. Instructions of one 32-key tile (16 heads, 512 + 64,
bf16, sm_90, `python -m irminsul_kernels.tools.aot --kernel extend`): 696 without rotation, 760 (+9.2 %) with it. A
branch around it made that 726 where every δ is 0 and 783 (+12.5 %) elsewhere. Tiles of 64 pairs have half the threads
for as many keys: 736 and 853 (+16 %).

Bytes moved: (R + d) * itemsize + 8 per key and tile, 2 R + d numbers per query; from about 8 tokens on (16 heads) the
matrix multiplications, 2 (2 R + d) operations per pair and key, take longer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from irminsul_kernels.attention.plans import ExtendPlan, heads_per_tile
from irminsul_kernels.checks import check_tensors, sizes
from irminsul_kernels.device import architecture, next_power_of_two
from irminsul_kernels.device_math import (
    INTERPRET,
    LOG2_E,
    cos_sin_of,
    half_precision,
    load_rows,
    operand,
    rounded,
    use_kernel,
)
from irminsul_kernels.launch import KernelConfig
from irminsul_kernels.ops.rotation import cos_sin

MERGE_PAIRS = 16
"""(token, head) pairs per program of the merge."""


def extend_reference(
    q_latent: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    slots: Tensor,
    q_positions: Tensor,
    sequences: Sequence[tuple[int, int, np.ndarray]],
    base: Tensor,
    turns: Tensor,
    scale: float,
) -> Tensor:
    """float64 [T, H, R]: what :func:`extend` computes, from the same stored rows. Queries of no sequence are NaN."""
    rank = q_latent.shape[2]
    out = torch.full(q_latent.shape, math.nan, dtype=torch.float64)
    for first_query, first_slot, positions in sequences:
        span = slice(first_query, first_query + len(positions))
        found = slots[first_slot : first_slot + int(positions[-1]) + 1].long()
        place = torch.arange(len(found), device=rows.device)
        keys = rows[found].double()
        cos, sin = (t.double() for t in cos_sin(place - base[found].long(), turns))
        low, high = keys[:, rank:].chunk(2, dim=1)
        k_rope = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=1)
        scores = torch.einsum("qhr,kr->qhk", q_latent[span].double(), keys[:, :rank])
        scores += torch.einsum("qhd,kd->qhk", q_rope[span].double(), k_rope)
        scores.masked_fill_(place > q_positions[span, None, None], -math.inf)
        out[span] = torch.softmax(scores * scale, dim=-1) @ keys[:, :rank]
    return out


def extend(
    q_latent: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    slots: Tensor,
    q_positions: Tensor,
    base: Tensor,
    turns: Tensor,
    plan: ExtendPlan,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the plan's queries in latent space.

    Args:
        q_latent: [T, H, R], q_nope @ W_UK; bf16 or fp16, contiguous.
        q_rope: [T, H, d], rotated for the queries' positions, half-split; same dtype, contiguous.
        rows: [capacity, R + d], one layer of the pool, same dtype, contiguous; the new tokens' rows are written.
        slots: int32 flat; the plan says where each sequence begins. Not checked against the capacity here: that would
            wait for the device (`build_layout` checks on the host).
        q_positions: int32 [T].
        base: int32 [capacity], position each row was rotated for.
        turns: int64 [d/2], from `turns_per_position`, on the device.
        plan: from :func:`plan_extend`, for this head count.
        scale: softmax scale.
        out: [T, H, R], dtype of q_latent or float32, contiguous; by default a new tensor of q_latent's dtype.

    Returns:
        `out`; queries that are in no piece of the plan are left as they were.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    tokens, heads, rank = sizes("q_latent", q_latent, "tokens", "heads", "rank")
    _, _, rope_dim = sizes("q_rope", q_rope, "tokens", "heads", "rope_dim")
    capacity, _ = sizes("rows", rows, "capacity", "rank + rope_dim")
    out = torch.empty_like(q_latent) if out is None else out
    if rank % 16 or rope_dim % 16:
        raise ValueError(f"rows of {rank} + {rope_dim}: both parts must be multiples of 16")
    check_tensors(
        rows.device,
        ("q_latent", q_latent, (torch.bfloat16, torch.float16), (tokens, heads, rank)),
        ("q_rope", q_rope, q_latent.dtype, (tokens, heads, rope_dim)),
        ("rows", rows, q_latent.dtype, (capacity, rank + rope_dim)),
        ("slots", slots, torch.int32, (slots.numel(),)),
        ("q_positions", q_positions, torch.int32, (tokens,)),
        ("base", base, torch.int32, (capacity,)),
        ("turns", turns, torch.int64, (rope_dim // 2,)),
        ("out", out, (torch.float32, q_latent.dtype), (tokens, heads, rank)),
    )
    if plan.heads != heads or plan.num_queries != tokens:
        raise ValueError(
            f"the plan is for {plan.num_queries} queries of {plan.heads} heads, q_latent has {tokens} of {heads}"
        )
    if not use_kernel(rows):
        raise ValueError(f"rows are on {rows.device}; there mla_attention or extend_reference computes this")
    if not len(plan.pieces):
        return out
    tuning = _tuning(plan.pairs, architecture(rows.device))
    shapes = _shapes(heads, rank, tuning)
    head_tiles = triton.cdiv(heads, shapes["BLOCK_HEADS"])
    half = rope_dim // 2
    partial = torch.empty(plan.num_partials, head_tiles, plan.pairs, rank, dtype=torch.float32, device=rows.device)
    lse = torch.empty(plan.num_partials, head_tiles, plan.pairs, dtype=torch.float32, device=rows.device)
    extend_kernel[(2 * head_tiles, len(plan.pieces))](
        q_latent, q_rope, rows, slots, q_positions, base, turns, plan.pieces, out, partial, lse, scale,
        HALF=half, BLOCK_HALF=max(16, next_power_of_two(half)), KEYS=tuning.keys, ROTATE=True, INTERPRET=INTERPRET,
        num_warps=tuning.warps, num_stages=tuning.stages, **shapes,
    )  # fmt: skip
    if len(plan.merges):
        merge_kernel[(2 * head_tiles, len(plan.merges), plan.pairs // MERGE_PAIRS)](
            plan.merges, partial, lse, out, PART_PAIRS=MERGE_PAIRS, INTERPRET=INTERPRET, num_warps=4, **shapes
        )
    return out


class _Tuning(NamedTuple):
    pairs: int
    keys: int
    warps: int
    stages: int


def _tuning(pairs: int, arch: int) -> _Tuning:
    """128 pairs fill two warpgroups; elsewhere 64 are what compiles without spills.

    Raises:
        ValueError: an architecture without room for a tile in shared memory.
    """
    if arch not in (80, 90, 100, 103):
        raise ValueError(f"extend needs 127 KB of shared memory: compute capability 8.0, 9.0, 10.0 or 10.3, not {arch}")
    if arch == 90:
        return _Tuning(128, 32, 8, 3) if pairs == 128 else _Tuning(64, 32, 4, 3)
    return _Tuning(64, 32, 8, 3)


def _shapes(heads: int, rank: int, tuning: _Tuning) -> dict[str, int]:
    return dict(
        HEADS=heads,
        RANK=rank,
        BLOCK_HEADS=heads_per_tile(heads),
        BLOCK_RANK=max(16, next_power_of_two(rank // 2)),
        PAIRS=tuning.pairs,
    )


@triton.jit
def extend_kernel(
    q_latent, q_rope, rows, slots, q_positions, base, turns, pieces, out, partial, lse, scale,
    HEADS: tl.constexpr, RANK: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
    PAIRS: tl.constexpr, KEYS: tl.constexpr, ROTATE: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = RANK // 2
    # the two parts of an output and the head tiles of a piece run at the same time: they read the same rows
    mine = tl.program_id(0) % 2 * PART
    other = PART - mine
    head_tile = tl.program_id(0) // 2
    piece = pieces + tl.program_id(1) * 6
    first_query = tl.load(piece)
    queries = tl.load(piece + 1)
    slots += tl.load(piece + 2)
    begin = tl.load(piece + 3)
    end = tl.load(piece + 4)

    m = tl.arange(0, PAIRS)
    # tokens after the last, and heads, repeat it and are not stored
    token = tl.minimum(m // BLOCK_HEADS, queries - 1)
    pair = token * HEADS + tl.minimum(head_tile * BLOCK_HEADS + m % BLOCK_HEADS, HEADS - 1)
    position = tl.load(q_positions + first_query + token)
    r = tl.arange(0, BLOCK_RANK)
    h = tl.arange(0, BLOCK_HALF)
    q_latent += first_query.to(tl.int64) * HEADS * RANK
    q_rope += first_query.to(tl.int64) * HEADS * 2 * HALF
    q_mine = operand(load_rows(q_latent + mine, pair * RANK, r, PART, BLOCK_RANK), INTERPRET)
    q_other = operand(load_rows(q_latent + other, pair * RANK, r, PART, BLOCK_RANK), INTERPRET)
    q_low = operand(load_rows(q_rope, pair * (2 * HALF), h, HALF, BLOCK_HALF), INTERPRET)
    q_high = operand(load_rows(q_rope + HALF, pair * (2 * HALF), h, HALF, BLOCK_HALF), INTERPRET)
    q_low = half_precision(q_low.to(tl.float32), INTERPRET)
    q_high = half_precision(q_high.to(tl.float32), INTERPRET)

    dtype: tl.constexpr = rows.dtype.element_ty
    top = tl.full([PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PAIRS], tl.float32)
    mixed = tl.zeros([PAIRS, BLOCK_RANK], tl.float32)
    n = tl.arange(0, KEYS)
    if ROTATE:
        turn = tl.load(turns + h, mask=h < HALF, other=0)
    for start in tl.range(begin, end, KEYS):
        # keys after the last repeat it and are hidden: the wide loads need no mask
        key = tl.minimum(start + n, end - 1)
        slot = tl.load(slots + key)
        row = slot.to(tl.int64) * (RANK + 2 * HALF)
        c_mine = operand(load_rows(rows + mine, row, r, PART, BLOCK_RANK), INTERPRET)
        c_other = operand(load_rows(rows + other, row, r, PART, BLOCK_RANK), INTERPRET)
        k_low = load_rows(rows + RANK, row, h, HALF, BLOCK_HALF).to(tl.float32)
        k_high = load_rows(rows + RANK + HALF, row, h, HALF, BLOCK_HALF).to(tl.float32)
        if ROTATE:
            delta = key - tl.load(base + slot)
            cos, sin = cos_sin_of(delta[:, None], turn[None, :], INTERPRET)
            low = k_low * cos - k_high * sin
            k_high = k_high * cos + k_low * sin
            k_low = low
        # before the products of c_KV: 3 % fewer instructions than after them
        k_low = half_precision(k_low, INTERPRET)
        k_high = half_precision(k_high, INTERPRET)
        scores = tl.dot(q_mine, tl.trans(c_mine))
        scores = tl.dot(q_other, tl.trans(c_other), scores)
        scores = tl.dot(q_low, tl.trans(k_low), scores)
        scores = tl.dot(q_high, tl.trans(k_high), scores)
        seen = (start + n < end)[None, :] & (key[None, :] <= position[:, None])
        scores = tl.where(seen, scores * (scale * LOG2_E), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        # a piece may begin after a token's position: everything is hidden, the maximum is -inf
        shift = tl.where(higher == float("-inf"), 0, higher)
        weight = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weight, axis=1)
        mixed = tl.dot(rounded(weight, dtype, INTERPRET), c_mine, mixed * fade[:, None])
        top = higher

    mixed = mixed / tl.where(total > 0, total, 1)[:, None]
    # read again, so that no address is kept in registers through the loop
    first_query = tl.load(piece, volatile=True)
    queries = tl.load(piece + 1, volatile=True)
    index = tl.load(piece + 5, volatile=True)
    if index < 0:
        out += (first_query.to(tl.int64) * HEADS + head_tile * BLOCK_HEADS) * RANK + mine
        _store_pairs(out, mixed, m, queries, head_tile, r, HEADS, RANK, BLOCK_HEADS, INTERPRET)
    else:
        at = (index.to(tl.int64) * (tl.num_programs(0) // 2) + head_tile) * PAIRS
        tl.store(partial + at * RANK + mine + (m[:, None] * RANK + r[None, :]), mixed, mask=r[None, :] < PART)
        if mine == 0:
            tl.store(lse + at + m, top + tl.log2(total))


@triton.jit
def merge_kernel(
    merges, partial, lse, out,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_RANK: tl.constexpr,
    PAIRS: tl.constexpr, PART_PAIRS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    PART: tl.constexpr = RANK // 2
    mine = tl.program_id(0) % 2 * PART
    head_tile = tl.program_id(0) // 2
    merge = merges + tl.program_id(1) * 4
    first_query = tl.load(merge)
    queries = tl.load(merge + 1)
    first = tl.load(merge + 2)
    count = tl.load(merge + 3)
    # of these pairs the token index within the tile is m // BLOCK_HEADS
    m = tl.program_id(2) * PART_PAIRS + tl.arange(0, PART_PAIRS)
    r = tl.arange(0, BLOCK_RANK)
    top = tl.full([PART_PAIRS], float("-inf"), tl.float32)
    total = tl.zeros([PART_PAIRS], tl.float32)
    mixed = tl.zeros([PART_PAIRS, BLOCK_RANK], tl.float32)
    for i in range(count):
        at = ((first + i).to(tl.int64) * (tl.num_programs(0) // 2) + head_tile) * PAIRS
        log = tl.load(lse + at + m)
        value = partial + at * RANK + mine + (m[:, None] * RANK + r[None, :])
        value = tl.load(value, mask=r[None, :] < PART, other=0)
        # the first piece begins at key 0, which every token sees: `higher` is never -inf
        higher = tl.maximum(top, log)
        fade = tl.exp2(top - higher)
        weight = tl.exp2(log - higher)
        mixed = mixed * fade[:, None] + value * weight[:, None]
        total = total * fade + weight
        top = higher
    out += (first_query.to(tl.int64) * HEADS + head_tile * BLOCK_HEADS) * RANK + mine
    _store_pairs(out, mixed / total[:, None], m, queries, head_tile, r, HEADS, RANK, BLOCK_HEADS, INTERPRET)


@triton.jit
def _store_pairs(
    out, value, m, queries, head_tile, r,
    HEADS: tl.constexpr, RANK: tl.constexpr, BLOCK_HEADS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    """Write pairs `m` of a tile whose first token and head `out` points to."""
    token = m // BLOCK_HEADS
    head = m % BLOCK_HEADS
    stored = (token < queries) & (head_tile * BLOCK_HEADS + head < HEADS)
    dtype: tl.constexpr = out.dtype.element_ty
    at = (token * HEADS + head)[:, None] * RANK + r[None, :]
    mask = stored[:, None] & (r[None, :] < RANK // 2)
    tl.store(out + at, rounded(value, dtype, INTERPRET).to(dtype), mask=mask)


def aot_configs(arch: int) -> list[KernelConfig]:
    """Rows of 512 + 64 with 8 to 128 heads, smaller rows, and the merge."""
    signature: dict[str, Any] = dict(
        q_latent="*bf16", q_rope="*bf16", rows="*bf16", slots="*i32", q_positions="*i32", base="*i32", turns="*i64",
        pieces="*i32", out="*bf16", partial="*fp32", lse="*fp32", scale="fp32",
    )  # fmt: skip
    aligned = tuple(name for name, kind in signature.items() if kind.startswith("*"))
    configs = []
    for pairs, heads, rank, half, kind in (
        (128, 8, 512, 32, "bf16"), (128, 16, 512, 32, "bf16"), (64, 16, 512, 32, "bf16"), (128, 16, 512, 32, "fp16"),
        (128, 128, 512, 32, "bf16"), (128, 16, 256, 16, "bf16"),
    ):  # fmt: skip
        tuning = _tuning(pairs, arch)
        if pairs == 64 and arch != 90:
            continue
        types = {name: t.replace("bf16", kind) for name, t in signature.items()}
        constexprs = _shapes(heads, rank, tuning) | dict(
            HALF=half, BLOCK_HALF=half, KEYS=tuning.keys, ROTATE=True, INTERPRET=False
        )
        name = f"extend, {heads} heads, {rank} + {2 * half}, {kind}, tiles of {tuning.pairs}"
        configs.append(
            KernelConfig(
                name, extend_kernel, types, constexprs, tuning.warps, tuning.stages, aligned, dict(ROTATE=False)
            )
        )
    merge = dict(merges="*i32", partial="*fp32", lse="*fp32", out="*bf16")
    constexprs = _shapes(16, 512, _tuning(128, arch)) | dict(PART_PAIRS=MERGE_PAIRS, INTERPRET=False)
    configs.append(KernelConfig("extend, merge of pieces", merge_kernel, merge, constexprs, 4, 3, tuple(merge)))
    return configs
