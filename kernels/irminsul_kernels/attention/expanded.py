# mypy: allow-untyped-defs
"""Expanded MLA attention: the prefill of many new tokens per sequence, at any ascending positions.

For each chunk of keys, rows are gathered by slot and their k_r is rotated by δ = position - base, once each; two matrix
multiplications expand c_KV to every head's keys and values; then each tile of 128 queries of a head walks over the keys
of the chunk up to its last position. The outputs of the chunks are merged in place by log-sum-exp, so memory is bounded
by `plans.CHUNK_BYTES` whatever the context. Tiles are filled from the last query backwards; the longest walks start
first.

Everything expanded is fp16, whatever the rows' dtype: bf16 keys, values and weights would round three times to 8 bits
(2.4e-3 to the output); fp16's 11 bits leave 4e-4, at the same speed. c_KV is normalised, so its range is no danger;
what lies beyond 65,504 is clamped where it is gathered.

Bytes moved per chunk of n keys: (R + d) * 2 n read, as much written and read again by the products, H (n + v) * 2 n
written and read by the tiles (from L2). From a few hundred queries on the multiplications take longer: 2 (n + d + v)
operations per query, head and key, half of them skipped by causality.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from irminsul_kernels.attention.plans import QUERIES, ExpandedPlan
from irminsul_kernels.checks import check_tensors, sizes
from irminsul_kernels.device import architecture, next_power_of_two
from irminsul_kernels.device_math import (
    INTERPRET,
    LOG2_E,
    TYPE_NAMES,
    cos_sin_of,
    half_precision,
    load_rows,
    operand,
    rounded,
    use_kernel,
)
from irminsul_kernels.launch import KernelConfig
from irminsul_kernels.ops.rotation import cos_sin

GATHERED = 32
"""Rows per program of the gather."""


def expanded_reference(
    q_nope: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    slots: Tensor,
    sequences: Sequence[tuple[int, int, np.ndarray]],
    base: Tensor,
    turns: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
) -> Tensor:
    """float64 [T, H, v]: what :func:`expanded` computes, from the same stored rows. Other queries are NaN."""
    rank = w_uk.shape[2]
    out = torch.full((*q_nope.shape[:2], w_uv.shape[2]), math.nan, dtype=torch.float64)
    for first_query, first_slot, positions in sequences:
        span = slice(first_query, first_query + len(positions))
        found = slots[first_slot : first_slot + int(positions[-1]) + 1].long()
        place = torch.arange(len(found))
        keys = rows[found].double()
        cos, sin = (t.double() for t in cos_sin(place - base[found].long(), turns))
        low, high = keys[:, rank:].chunk(2, dim=1)
        k_rope = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=1)
        k_nope = torch.einsum("kr,hnr->khn", keys[:, :rank], w_uk.double())
        scores = torch.einsum("qhn,khn->qhk", q_nope[span].double(), k_nope)
        scores += torch.einsum("qhd,kd->qhk", q_rope[span].double(), k_rope)
        scores.masked_fill_(place > torch.from_numpy(positions)[:, None, None], -math.inf)
        values = torch.einsum("kr,hrv->khv", keys[:, :rank], w_uv.double())
        out[span] = torch.einsum("qhk,khv->qhv", torch.softmax(scores * scale, dim=-1), values)
    return out


def expanded(
    q_nope: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    slots: Tensor,
    q_positions: Tensor,
    base: Tensor,
    turns: Tensor,
    w_uk: Tensor,
    w_uv: Tensor,
    plan: ExpandedPlan,
    scale: float,
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of the plan's queries.

    Args:
        q_nope: [T, H, n], queries without position; bf16, fp16 or fp32, contiguous.
        q_rope: [T, H, d], rotated for the queries' positions, half-split; same dtype, contiguous.
        rows: [capacity, R + d], one layer of the pool, same dtype, contiguous; the new tokens' rows are written.
        slots: int32 flat; the plan says where each sequence begins. Not checked against the capacity here: that would
            wait for the device (`build_layout` checks on the host).
        q_positions: int32 [T].
        base: int32 [capacity], position each row was rotated for.
        turns: int64 [d/2], from `turns_per_position`, on the device.
        w_uk: [H, n, R], w_uv: [H, R, v], contiguous.
        plan: from :func:`plan_expanded`.
        scale: softmax scale.
        out: [T, H, v], dtype of q_nope or float32, contiguous; by default a new tensor of q_nope's dtype.

    Returns:
        `out`; queries that are not in the plan are left as they were.

    Raises:
        ValueError: shapes, dtypes, devices or strides that do not fit.
    """
    tokens, heads, nope_dim = sizes("q_nope", q_nope, "tokens", "heads", "nope_dim")
    _, _, rope_dim = sizes("q_rope", q_rope, "tokens", "heads", "rope_dim")
    _, rank, value_dim = sizes("w_uv", w_uv, "heads", "rank", "value_dim")
    capacity, _ = sizes("rows", rows, "capacity", "rank + rope_dim")
    out = q_nope.new_empty(tokens, heads, value_dim) if out is None else out
    for name, size in (("nope_dim", nope_dim), ("rope_dim", rope_dim), ("value_dim", value_dim), ("rank", rank)):
        if size % 16:
            raise ValueError(f"{name} is {size}; it must be a multiple of 16")
    check_tensors(
        rows.device,
        ("q_nope", q_nope, tuple(TYPE_NAMES), (tokens, heads, nope_dim)),
        ("q_rope", q_rope, q_nope.dtype, (tokens, heads, rope_dim)),
        ("rows", rows, q_nope.dtype, (capacity, rank + rope_dim)),
        ("slots", slots, torch.int32, (slots.numel(),)),
        ("q_positions", q_positions, torch.int32, (tokens,)),
        ("base", base, torch.int32, (capacity,)),
        ("turns", turns, torch.int64, (rope_dim // 2,)),
        ("w_uk", w_uk, q_nope.dtype, (heads, nope_dim, rank)),
        ("w_uv", w_uv, q_nope.dtype, (heads, rank, value_dim)),
        ("out", out, (torch.float32, q_nope.dtype), (tokens, heads, value_dim)),
    )
    if plan.num_queries != tokens:
        raise ValueError(f"the plan is for {plan.num_queries} queries, q_nope has {tokens}")
    if not use_kernel(rows):
        raise ValueError(f"rows are on {rows.device}; there mla_attention or expanded_reference computes this")
    if not plan.chunks:
        return out
    most = max(chunk.keys for chunk in plan.chunks)
    latent, turned, keys, values = (
        rows.new_empty(shape, dtype=torch.float16)
        for shape in ((most, rank), (most, rope_dim), (most, heads * nope_dim), (heads * most * value_dim,))
    )
    to_keys, to_values = w_uk.to(torch.float16).view(heads * nope_dim, rank).T, w_uv.to(torch.float16)
    # with one chunk nothing is merged and the result goes straight to its place
    sums = out if len(plan.chunks) == 1 else out.new_empty(out.shape, dtype=torch.float32)
    lse = torch.empty(tokens, heads, dtype=torch.float32, device=rows.device)
    tile_keys, warps, stages = _tuning(architecture(rows.device))
    for chunk in plan.chunks:
        n = chunk.keys
        gather_kernel[(triton.cdiv(chunk.longest_span, GATHERED), len(chunk.spans))](
            rows, slots, base, turns, chunk.spans, latent, turned,
            RANK=rank, HALF=rope_dim // 2, BLOCK_RANK=next_power_of_two(rank),
            BLOCK_HALF=next_power_of_two(rope_dim // 2), KEYS=GATHERED, INTERPRET=INTERPRET, num_warps=8,
        )  # fmt: skip
        torch.mm(latent[:n], to_keys, out=keys[:n])
        chunk_values = values[: heads * n * value_dim].view(heads, n, value_dim)
        torch.bmm(latent[:n].expand(heads, n, rank), to_values, out=chunk_values)
        expanded_kernel[(len(chunk.pieces), heads)](
            q_nope, q_rope, keys, turned, chunk_values, q_positions, chunk.pieces, sums, lse, scale, n,
            HEADS=heads, NOPE=nope_dim, ROPE=rope_dim, VALUE=value_dim, BLOCK_NOPE=max(16, next_power_of_two(nope_dim)),
            BLOCK_ROPE=max(16, next_power_of_two(rope_dim)), BLOCK_VALUE=max(16, next_power_of_two(value_dim)),
            QUERIES=QUERIES, KEYS=tile_keys, INTERPRET=INTERPRET, num_warps=warps, num_stages=stages,
        )  # fmt: skip
    if sums is not out:
        for first, count in plan.spans:
            out[first : first + count] = sums[first : first + count]
    return out


def _tuning(arch: int) -> tuple[int, int, int]:
    """Keys of a tile, warps, pipeline stages.

    Raises:
        ValueError: an architecture without room for a tile in shared memory.
    """
    if arch not in (80, 90, 100, 103):
        raise ValueError(f"expanded needs compute capability 8.0, 9.0, 10.0 or 10.3, not {arch}: shared memory")
    return (64, 8, 3) if arch >= 90 else (64, 8, 2)


@triton.jit
def gather_kernel(
    rows, slots, base, turns, spans, latent, turned,
    RANK: tl.constexpr, HALF: tl.constexpr, BLOCK_RANK: tl.constexpr, BLOCK_HALF: tl.constexpr,
    KEYS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    span = spans + tl.program_id(1) * 4
    first_slot = tl.load(span)
    count = tl.load(span + 1)
    first_position = tl.load(span + 2)
    place = tl.load(span + 3)
    key = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    r = tl.arange(0, BLOCK_RANK)
    h = tl.arange(0, BLOCK_HALF)
    # programs after the end of a short span do nothing
    valid = key < count
    slot = tl.load(slots + first_slot + key, mask=valid, other=0)
    delta = first_position + key - tl.load(base + slot, mask=valid, other=0)
    row = rows + slot.to(tl.int64)[:, None] * (RANK + 2 * HALF)
    wide = valid[:, None] & (r[None, :] < RANK)
    c = half_precision(tl.load(row + r[None, :], mask=wide, other=0).to(tl.float32), INTERPRET)
    at = (place + key).to(tl.int64)[:, None]
    tl.store(latent + at * RANK + r[None, :], c.to(tl.float16), mask=wide)
    narrow = valid[:, None] & (h[None, :] < HALF)
    low = tl.load(row + RANK + h[None, :], mask=narrow, other=0).to(tl.float32)
    high = tl.load(row + RANK + HALF + h[None, :], mask=narrow, other=0).to(tl.float32)
    turn = tl.load(turns + h, mask=h < HALF, other=0)
    cos, sin = cos_sin_of(delta[:, None], turn[None, :], INTERPRET)
    at = turned + at * (2 * HALF) + h[None, :]
    tl.store(at, half_precision(low * cos - high * sin, INTERPRET).to(tl.float16), mask=narrow)
    tl.store(at + HALF, half_precision(high * cos + low * sin, INTERPRET).to(tl.float16), mask=narrow)


@triton.jit
def expanded_kernel(
    q_nope, q_rope, keys, k_rope, values, q_positions, pieces, out, lse, scale, chunk,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    piece = pieces + tl.program_id(0) * 6
    head = tl.program_id(1)
    first_query = tl.load(piece)
    queries = tl.load(piece + 1)
    first_key = tl.load(piece + 2)
    first_position = tl.load(piece + 3)
    count = tl.load(piece + 4)
    # queries after the last repeat it and are not stored
    m = tl.arange(0, QUERIES)
    token = tl.minimum(m, queries - 1)
    # positions count from the chunk's first key; under 0 where a query sees nothing of it
    position = tl.load(q_positions + first_query + token) - first_position
    lowest = tl.load(q_positions + first_query) - first_position
    pair = first_query.to(tl.int64) * HEADS + head
    q = load_rows(q_nope + pair * NOPE, token * (HEADS * NOPE), tl.arange(0, BLOCK_NOPE), NOPE, BLOCK_NOPE)
    q_r = load_rows(q_rope + pair * ROPE, token * (HEADS * ROPE), tl.arange(0, BLOCK_ROPE), ROPE, BLOCK_ROPE)
    q = half_precision(q.to(tl.float32), INTERPRET)
    q_r = half_precision(q_r.to(tl.float32), INTERPRET)
    keys += (first_key.to(tl.int64) * HEADS + head) * NOPE
    k_rope += first_key * ROPE
    values += (head.to(tl.int64) * chunk + first_key) * VALUE

    top = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    mixed = tl.zeros([QUERIES, BLOCK_VALUE], tl.float32)
    # keys that every query of the tile sees need no mask
    full = tl.maximum(tl.minimum(lowest + 1, count), 0) // KEYS * KEYS
    top, total, mixed = _walk(
        0, full, count, q, q_r, keys, k_rope, values, position, top, total, mixed, scale,
        HEADS, NOPE, ROPE, VALUE, BLOCK_NOPE, BLOCK_ROPE, BLOCK_VALUE, KEYS, False, INTERPRET,
    )  # fmt: skip
    top, total, mixed = _walk(
        full, count, count, q, q_r, keys, k_rope, values, position, top, total, mixed, scale,
        HEADS, NOPE, ROPE, VALUE, BLOCK_NOPE, BLOCK_ROPE, BLOCK_VALUE, KEYS, True, INTERPRET,
    )  # fmt: skip

    mixed = mixed / tl.where(total > 0, total, 1)[:, None]
    log = top + tl.log2(total)
    column = tl.arange(0, BLOCK_VALUE)
    target = out + (pair * VALUE + (token * (HEADS * VALUE))[:, None] + column[None, :])
    mask = (m < queries)[:, None] & (column[None, :] < VALUE)
    if tl.load(piece + 5) != 0:
        # an earlier chunk began at key 0, which every query sees: its log-sum-exp is finite
        earlier = tl.load(lse + pair + token * HEADS)
        higher = tl.maximum(earlier, log)
        old, new = tl.exp2(earlier - higher), tl.exp2(log - higher)
        before = tl.load(target, mask=mask, other=0).to(tl.float32)
        mixed = (before * old[:, None] + mixed * new[:, None]) / (old + new)[:, None]
        log = higher + tl.log2(old + new)
    dtype: tl.constexpr = out.dtype.element_ty
    tl.store(target, rounded(mixed, dtype, INTERPRET).to(dtype), mask=mask)
    tl.store(lse + pair + token * HEADS, log, mask=m < queries)


@triton.jit
def _walk(
    begin, end, count, q, q_r, keys, k_rope, values, position, top, total, mixed, scale,
    HEADS: tl.constexpr, NOPE: tl.constexpr, ROPE: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_NOPE: tl.constexpr, BLOCK_ROPE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    KEYS: tl.constexpr, MASK: tl.constexpr, INTERPRET: tl.constexpr,
):  # fmt: skip
    n = tl.arange(0, KEYS)
    i = tl.arange(0, BLOCK_NOPE)
    j = tl.arange(0, BLOCK_ROPE)
    column = tl.arange(0, BLOCK_VALUE)
    for start in tl.range(begin, end, KEYS):
        key = start + n
        if MASK:
            # keys after the last repeat it and are hidden
            key = tl.minimum(key, count - 1)
        k = operand(load_rows(keys, key.to(tl.int64) * (HEADS * NOPE), i, NOPE, BLOCK_NOPE), INTERPRET)
        k_r = operand(load_rows(k_rope, key * ROPE, j, ROPE, BLOCK_ROPE), INTERPRET)
        v = operand(load_rows(values, key * VALUE, column, VALUE, BLOCK_VALUE), INTERPRET)
        scores = tl.dot(q, tl.trans(k))
        scores = tl.dot(q_r, tl.trans(k_r), scores)
        scores *= scale * LOG2_E
        if MASK:
            seen = (start + n < count)[None, :] & (key[None, :] <= position[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        shift = tl.where(higher == float("-inf"), 0, higher)
        weight = tl.exp2(scores - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weight, axis=1)
        mixed = tl.dot(rounded(weight, tl.float16, INTERPRET), v, mixed * fade[:, None])
        top = higher
    return top, total, mixed


def aot_configs(arch: int) -> list[KernelConfig]:
    """Heads of 128 + 64 and 128, smaller ones, and the gathering of rows."""
    keys, warps, stages = _tuning(arch)
    signature: dict[str, Any] = dict(
        q_nope="*bf16", q_rope="*bf16", keys="*fp16", k_rope="*fp16", values="*fp16", q_positions="*i32",
        pieces="*i32", out="*bf16", lse="*fp32", scale="fp32", chunk="i32",
    )  # fmt: skip
    configs = []
    for heads, nope, rope, value, kind, out in (
        (16, 128, 64, 128, "bf16", "bf16"), (128, 128, 64, 128, "bf16", "fp32"), (16, 128, 64, 128, "fp16", "fp16"),
        (8, 64, 32, 64, "bf16", "bf16"),
    ):  # fmt: skip
        constexprs = dict(
            HEADS=heads, NOPE=nope, ROPE=rope, VALUE=value, BLOCK_NOPE=nope, BLOCK_ROPE=rope, BLOCK_VALUE=value,
            QUERIES=QUERIES, KEYS=keys, INTERPRET=False,
        )  # fmt: skip
        types = signature | dict(q_nope=f"*{kind}", q_rope=f"*{kind}", out=f"*{out}")
        aligned = tuple(name for name, t in types.items() if t.startswith("*"))
        name = f"expanded, {heads} heads, {nope} + {rope} and {value}, {kind} to {out}"
        configs.append(KernelConfig(name, expanded_kernel, types, constexprs, warps, stages, aligned))
    gather: dict[str, Any] = dict(
        rows="*bf16", slots="*i32", base="*i32", turns="*i64", spans="*i32", latent="*fp16", turned="*fp16"
    )
    constexprs = dict(RANK=512, HALF=32, BLOCK_RANK=512, BLOCK_HALF=32, KEYS=GATHERED, INTERPRET=False)
    configs.append(
        KernelConfig("expanded, rows gathered and rotated", gather_kernel, gather, constexprs, 8, 1, tuple(gather))
    )
    return configs
