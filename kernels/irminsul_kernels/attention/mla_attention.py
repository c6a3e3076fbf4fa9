"""MLA attention over rows that lie at any slot and were rotated for any base position.

A row is `c_KV` (R numbers, no position in it) followed by `k_r` (d numbers, rotated for the row's base position). A
sequence is a vector of slots in order of position; row j of it is seen at position j, so its RoPE part must be rotated
by δ = j - base. Rows are never written here.

On a GPU the kernels of `decode`, `extend` and `expanded` do the work. What follows here is the torch path. It works on
*runs*: stretches of a sequence whose slots are consecutive and share one δ. A run is a view of the pool, so nothing is
gathered: the absorbed form rotates the few queries by -δ instead of the many keys (the same scores), the expanded form
rotates d numbers per key while it expands them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from irminsul_kernels.attention.flat_layout import FlatLayout, build_flat_layout
from irminsul_kernels.device import multiprocessors
from irminsul_kernels.ops.rotation import cos_sin, rotate

KERNEL_ARCHITECTURES = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities whose shared memory holds the kernels' tiles."""
QUERY_TILE = 128
"""Queries per score matrix: bounds it to heads * 128 * keys and skips most of the keys that causality hides."""


class Run(NamedTuple):
    """`rows[slot : slot + length]` are the keys at positions `key .. key + length`, moved by δ of `delta_index`."""

    key: int
    slot: int
    length: int
    delta_index: int
    delta: int


class Gathered(NamedTuple):
    """Every key on its own: int64 [num_keys] slots and float32 [num_keys, d/2] rotations."""

    slots: Tensor
    cos: Tensor
    sin: Tensor


@dataclass(frozen=True)
class SequenceLayout:
    """One sequence's share of a batch: queries [q_start, q_end) of the flat batch over keys 0 .. num_keys."""

    q_start: int
    q_end: int
    num_keys: int
    q_positions: Tensor
    """int64 [q_end - q_start], ascending."""
    runs: list[Run]
    cos: Tensor
    """float32 [distinct δ, d/2], rotation by +δ."""
    sin: Tensor
    gathered: Gathered | None
    """Set, and runs empty, where runs are too short to be worth a matrix product each."""
    tiles: list[tuple[int, int, int, int]]
    """(first query, query after the last, position of the first, of the last) of each score matrix."""


@dataclass(frozen=True)
class AttentionLayout:
    """Everything about a batch that is the same in all layers. Build it once per forward pass."""

    sequences: list[SequenceLayout]
    """Of the torch path; empty where the kernels do the work."""
    num_queries: int
    flat: FlatLayout | None = None
    """Of the kernels."""


def build_layout(
    slots: list[np.ndarray],
    base: np.ndarray,
    q_positions: list[np.ndarray],
    turns: Tensor,
    *,
    device: torch.device | str = "cpu",
    min_run: int = 32,
    kernels: bool | None = None,
    device_base: Tensor | None = None,
) -> AttentionLayout:
    """Describe a batch of sequences.

    Args:
        slots: per sequence int32 [keys]; the slot of each position from 0. Keys beyond the last query are left out.
        base: int32 [capacity], base position of each slot.
        q_positions: per sequence int64 [queries], strictly ascending; queries of the flat batch lie in this order.
        turns: int64 [d/2] on the CPU, from :func:`turns_per_position`.
        min_run: mean run length below which a sequence is gathered instead (torch path).
        kernels: whether Triton kernels compute the batch, in bf16 or fp16; by default on GPUs that can hold them.
        device_base: `base` as an int32 tensor on the device, to save its upload (kernels).

    Raises:
        ValueError: a query position without a slot, a slot out of range, positions that do not ascend.
    """
    kernels = _has_kernels(device) if kernels is None else kernels
    sequences, start = [], 0
    for index, (sequence_slots, positions) in enumerate(zip(slots, q_positions, strict=True)):
        if len(positions) == 0:
            raise ValueError(f"sequence {index} has no query; leave it out of the batch")
        if positions[0] < 0 or positions[-1] >= len(sequence_slots):
            raise ValueError(
                f"sequence {index}: positions {positions[0]}..{positions[-1]} leave its {len(sequence_slots)} slots"
            )
        if len(positions) > 1 and not (np.diff(positions) > 0).all():
            raise ValueError(f"sequence {index}: query positions must be strictly ascending")
        keys = sequence_slots[: positions[-1] + 1].astype(np.int64)
        if keys.min() < 0 or keys.max() >= len(base):
            raise ValueError(f"sequence {index}: slots {keys.min()}..{keys.max()} leave the pool of {len(base)}")
        if not kernels:
            sequences.append(_sequence_layout(start, keys, base, positions, turns, device, min_run))
        start += len(positions)
    if not kernels:
        return AttentionLayout(sequences, start)
    flat = build_flat_layout(slots, base if device_base is None else device_base, q_positions, turns, device)
    return AttentionLayout([], start, flat)


def _has_kernels(device: torch.device | str) -> bool:
    on_gpu = torch.device(device).type == "cuda"
    return on_gpu and torch.cuda.get_device_capability(device) in KERNEL_ARCHITECTURES


def _sequence_layout(
    start: int,
    keys: np.ndarray,
    base: np.ndarray,
    positions: np.ndarray,
    turns: Tensor,
    device: torch.device | str,
    min_run: int,
) -> SequenceLayout:
    deltas = np.arange(len(keys)) - base[keys]
    breaks = np.flatnonzero((np.diff(keys) != 1) | (np.diff(deltas) != 0)) + 1
    starts = np.concatenate(([0], breaks))
    distinct, delta_index = np.unique(deltas[starts], return_inverse=True)
    cos, sin = (t.to(device) for t in cos_sin(torch.from_numpy(distinct), turns))
    gathered = None
    runs: list[Run] = []
    if len(keys) < min_run * len(starts) and len(starts) > 1:
        per_key = torch.from_numpy(np.repeat(delta_index, np.diff(np.append(starts, len(keys))))).to(device)
        gathered = Gathered(torch.from_numpy(keys).to(device), cos[per_key], sin[per_key])
    else:
        lengths = np.diff(np.append(starts, len(keys)))
        runs = [
            Run(int(k), int(keys[k]), int(n), int(d), int(distinct[d]))
            for k, n, d in zip(starts, lengths, delta_index, strict=True)
        ]
    q_positions = torch.from_numpy(positions.astype(np.int64)).to(device)
    return SequenceLayout(
        start, start + len(positions), len(keys), q_positions, runs, cos, sin, gathered, _tiles(positions)
    )


def _tiles(positions: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Queries far apart are not tiled together: every query of a tile is multiplied with the keys of its last one."""
    jumps = np.flatnonzero(np.diff(positions) > QUERY_TILE) + 1
    groups = zip([0, *jumps.tolist()], [*jumps.tolist(), len(positions)], strict=True)
    spans = [(a, min(a + QUERY_TILE, end)) for begin, end in groups for a in range(begin, end, QUERY_TILE)]
    return [(a, b, int(positions[a]), int(positions[b - 1])) for a, b in spans]


def expanded_threshold(rank: int, nope_dim: int, value_dim: int) -> int:
    """New tokens per sequence from which the expanded form costs fewer operations than the absorbed one.

    Per query, key and head the absorbed form costs 2R + d products, the expanded one n + d + v, and R (n + v) once per
    key.
    """
    return -(-rank * (nope_dim + value_dim) // max(1, 2 * rank - nope_dim - value_dim))


def mla_attention(
    q_nope: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    layout: AttentionLayout,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
) -> Tensor:
    """Causal MLA attention of a ragged batch: query at position p sees keys 0 .. p of its sequence.

    Args:
        q_nope: [T, H, n] queries without position.
        q_rope: [T, H, d] queries rotated for their positions.
        rows: [capacity, R + d], one layer of the pool; the rows of the batch's own tokens are already written.
        layout: from :func:`build_layout`.
        w_uk: [H, n, R], expands c_KV to keys.
        w_uv: [H, R, v], expands c_KV to values.
        scale: softmax scale.

    Returns:
        [T, H, v] in q_nope's dtype; scores and sums are float32.

    Raises:
        ValueError: shapes that do not fit together, with the names and shapes.
    """
    tokens, heads, nope_dim = q_nope.shape
    rank, value_dim, rope_dim = w_uk.shape[2], w_uv.shape[2], q_rope.shape[2]
    if tokens != layout.num_queries:
        raise ValueError(f"q_nope holds {tokens} queries, the layout {layout.num_queries}")
    if q_rope.shape[:2] != (tokens, heads) or w_uk.shape[:2] != (heads, nope_dim) or w_uv.shape[:2] != (heads, rank):
        raise ValueError(
            f"q_nope {tuple(q_nope.shape)}, q_rope {tuple(q_rope.shape)}, w_uk {tuple(w_uk.shape)}, "
            f"w_uv {tuple(w_uv.shape)} do not fit together"
        )
    if rows.shape[1] != rank + rope_dim:
        raise ValueError(f"rows are {rows.shape[1]} wide; w_uk and q_rope ask for {rank} + {rope_dim}")
    threshold = expanded_threshold(rank, nope_dim, value_dim)
    if layout.flat is not None:
        return _by_kernels(q_nope, q_rope, rows, layout.flat, w_uk, w_uv, scale, threshold)
    out = q_nope.new_empty(tokens, heads, value_dim)
    for sequence in layout.sequences:
        span = slice(sequence.q_start, sequence.q_end)
        form = _expanded if sequence.q_end - sequence.q_start >= threshold else _absorbed
        out[span] = form(q_nope[span].float(), q_rope[span].float(), rows, sequence, w_uk, w_uv, scale).to(out.dtype)
    return out


def _by_kernels(
    q_nope: Tensor,
    q_rope: Tensor,
    rows: Tensor,
    flat: FlatLayout,
    w_uk: Tensor,
    w_uv: Tensor,
    scale: float,
    threshold: int,
) -> Tensor:
    from irminsul_kernels.attention.decode import decode_attention, supports
    from irminsul_kernels.attention.expanded import expanded
    from irminsul_kernels.attention.extend import extend
    from irminsul_kernels.attention.plans import chunk_keys

    tokens, heads, nope_dim = q_nope.shape
    rank, value_dim, rope_dim = w_uk.shape[2], w_uv.shape[2], q_rope.shape[2]
    if q_nope.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"q_nope is {q_nope.dtype}; the kernels take bfloat16 or float16 (or build_layout(kernels=False))"
        )
    plans = flat.plans(
        heads,
        threshold,
        chunk_keys(heads, nope_dim, value_dim),
        supports(heads, rank, rope_dim, q_nope.dtype),
        lambda: multiprocessors(rows.device),
    )
    q_nope, q_rope = q_nope.contiguous(), q_rope.contiguous()
    out = q_nope.new_empty(tokens, heads, value_dim)
    pool = (rows, flat.slots)
    if plans.expanded.chunks:
        expanded(q_nope, q_rope, *pool, flat.q_positions, flat.base, flat.turns, w_uk, w_uv, plans.expanded, scale, out)
    if plans.num_absorbed == 0:
        return out
    if plans.absorbed is not None:
        q_nope, q_rope = q_nope[plans.absorbed], q_rope[plans.absorbed]
    q_latent = torch.bmm(q_nope.transpose(0, 1), w_uk).transpose(0, 1).contiguous()
    mixed, single = torch.empty_like(q_latent), plans.singles
    if single:
        decode_attention(
            q_latent[:single], q_rope[:single], rows, flat.base, flat.slots, plans.kv_indptr, flat.turns, scale,
            max_length=plans.max_length, out=mixed[:single],
        )  # fmt: skip
    extend(q_latent, q_rope, *pool, plans.absorbed_positions, flat.base, flat.turns, plans.extend, scale, mixed)
    values = torch.bmm(mixed.transpose(0, 1), w_uv).transpose(0, 1)
    if plans.absorbed is None:
        return values.contiguous()
    out[plans.absorbed] = values
    return out


def _absorbed(
    q_nope: Tensor, q_rope: Tensor, rows: Tensor, seq: SequenceLayout, w_uk: Tensor, w_uv: Tensor, scale: float
) -> Tensor:
    queries, heads, _ = q_nope.shape
    rank = w_uk.shape[2]
    latent = torch.einsum("qhn,hnr->qhr", q_nope, w_uk.float())
    scores = q_nope.new_empty(queries * heads, seq.num_keys)
    if seq.gathered is not None:
        keys = rows[seq.gathered.slots].float()
        keys[:, rank:] = rotate(keys[:, rank:], seq.gathered.cos, seq.gathered.sin)
        pieces = [(0, seq.num_keys, keys)]
        torch.mm(torch.cat((latent, q_rope), dim=-1).flatten(0, 1), keys.T, out=scores)
    else:
        # R(-δ) on the query gives the scores of R(δ) on the key: (R(-δ) q) · k == q · (R(δ) k).
        turned = rotate(q_rope, seq.cos[:, None, None], -seq.sin[:, None, None])
        full = torch.cat((latent.expand(len(seq.cos), -1, -1, -1), turned), dim=-1).flatten(1, 2)
        pieces = [(r.key, r.length, rows[r.slot : r.slot + r.length].float()) for r in seq.runs]
        for run, (key, length, piece) in zip(seq.runs, pieces, strict=True):
            torch.mm(full[run.delta_index], piece.T, out=scores[:, key : key + length])
    scores = scores.view(queries, heads, seq.num_keys).mul_(scale)
    if queries > 1:
        _hide_future(scores.transpose(0, 1), seq.q_positions, 0)
    weights = torch.softmax(scores, dim=-1).flatten(0, 1)
    mixed = weights.new_zeros(queries * heads, rank)
    for key, length, piece in pieces:
        mixed.addmm_(weights[:, key : key + length], piece[:, :rank])
    return torch.einsum("qhr,hrv->qhv", mixed.view(queries, heads, rank), w_uv.float())


def _expanded(
    q_nope: Tensor, q_rope: Tensor, rows: Tensor, seq: SequenceLayout, w_uk: Tensor, w_uv: Tensor, scale: float
) -> Tensor:
    heads, nope_dim, rank = w_uk.shape
    value_dim, rope_dim, n = w_uv.shape[2], q_rope.shape[2], seq.num_keys
    # one matrix that turns a c_KV into every head's key and value: [R, H * n + H * v]
    expand = torch.cat((w_uk.float().permute(2, 0, 1).flatten(1), w_uv.float().permute(1, 0, 2).flatten(1)), dim=1)
    expanded = q_nope.new_empty(n, expand.shape[1])
    turned = q_nope.new_empty(n, rope_dim)
    if seq.gathered is not None:
        found = rows[seq.gathered.slots].float()
        torch.mm(found[:, :rank], expand, out=expanded)
        turned.copy_(rotate(found[:, rank:], seq.gathered.cos, seq.gathered.sin))
    else:
        for run in seq.runs:
            piece = rows[run.slot : run.slot + run.length].float()
            span = slice(run.key, run.key + run.length)
            torch.mm(piece[:, :rank], expand, out=expanded[span])
            if run.delta == 0:
                turned[span] = piece[:, rank:]
            else:
                turned[span] = rotate(piece[:, rank:], seq.cos[run.delta_index], seq.sin[run.delta_index])
    keys = expanded[:, : heads * nope_dim].unflatten(1, (heads, nope_dim)).permute(1, 2, 0)
    values = expanded[:, heads * nope_dim :].unflatten(1, (heads, value_dim)).transpose(0, 1)
    q_nope, q_rope = q_nope.transpose(0, 1).mul(scale), q_rope.transpose(0, 1).mul(scale)
    out = q_nope.new_empty(q_nope.shape[1], heads, value_dim)
    for begin, end, first, last in seq.tiles:
        tile, seen = slice(begin, end), last + 1
        # k_r is the same for all heads: one product; the heads' own parts are added to it in place
        scores = torch.mm(q_rope[:, tile].flatten(0, 1), turned[:seen].T).view(heads, -1, seen)
        scores.baddbmm_(q_nope[:, tile], keys[:, :, :seen])
        _hide_future(scores, seq.q_positions[tile], first)
        weights = torch.softmax(scores, dim=-1)
        out[tile] = torch.bmm(weights, values[:, :seen]).transpose(0, 1)
    return out


def _hide_future(scores: Tensor, q_positions: Tensor, first: int) -> None:
    """Set scores [H, q, k] of keys after the query's position to -inf; keys before `first` are seen by every query."""
    keys = torch.arange(first, scores.shape[2], device=scores.device)
    scores[:, :, first:].masked_fill_(keys[None, :] > q_positions[:, None], float("-inf"))
