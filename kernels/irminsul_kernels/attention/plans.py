"""Work schedules of the attention kernels, computed on the host once per forward pass.

Decode: the number of splits of each sequence. Extend and expanded: the queries of a sequence are put into tiles from
the last one backwards. Every query of a tile is multiplied with the keys of the tile's last one, so this order makes
the sum of these walks over the keys smallest. Long walks start first, so that the last programs to start are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from irminsul_kernels.device import architecture, next_power_of_two, upload

MAX_SPLITS = 128
MIN_TILES = 4
"""Smallest share of a split of decode, in tiles of rows."""
MAX_HEADS = 64
"""Most heads per tile; more heads take several tiles."""
MIN_PIECE = 256
"""Walks of up to this many keys are not cut: a piece costs a write and a read of its partial output."""
QUERIES = 128
"""Queries per tile of the expanded form, all of one head."""
CHUNK_BYTES = 256 << 20
"""Most bytes of expanded keys and values at a time: 32,768 tokens with 16 heads of 128 + 128, 4,096 with 128 heads."""


@dataclass(frozen=True)
class ExtendPlan:
    """Work of each program of the extend kernel. The same for all layers; depends on the head count."""

    heads: int
    pairs: int
    """(token, head) pairs per tile: 128, or 64 where no sequence fills more or the device cannot hold it."""
    num_queries: int
    """Queries of the flat batch, including those of other plans."""
    pieces: Tensor
    """int32 [pieces, 6]: first query, queries, where its sequence begins in `slots`, first key, key after the last,
    index of its partial output or -1 where the piece is the whole walk."""
    merges: Tensor
    """int32 [cut tiles, 4]: first query, queries, first partial output, partial outputs."""
    num_partials: int


def heads_per_tile(heads: int) -> int:
    """Heads per tile: padded to a power of two, at most 64."""
    return min(MAX_HEADS, next_power_of_two(heads))


def tile_pairs(wanted: int, arch: int) -> int:
    """Pairs per tile: 128 fill two warpgroups of sm_90; on other architectures only 64 compile without spills."""
    return 128 if arch == 90 and wanted > 64 else 64


def plan_extend(
    sequences: Sequence[tuple[int, int, np.ndarray]],
    num_queries: int,
    heads: int,
    device: torch.device | str,
    multiprocessors: int = 132,
) -> ExtendPlan:
    """Lay out the work of a batch.

    Args:
        sequences: (first query in the flat batch, first slot in `slots`, int64 ascending positions of the queries).
        num_queries: queries of the flat batch.
        heads: of the model.
        multiprocessors: of the device; walks are cut so that there is a piece for each.

    Raises:
        ValueError: a head count under 1.
    """
    if heads < 1:
        raise ValueError(f"heads is {heads}; it must be at least 1")
    longest = max((len(positions) for _, _, positions in sequences), default=0)
    pairs = tile_pairs(longest * heads_per_tile(heads), architecture(device))
    tokens = pairs // heads_per_tile(heads)
    tiles = []
    for first_query, first_slot, positions in sequences:
        ends = np.arange(len(positions), 0, -tokens)
        starts = np.maximum(ends - tokens, 0)
        tiles.append(
            np.stack([first_query + starts, ends - starts, np.full(len(ends), first_slot), positions[ends - 1] + 1], 1)
        )
    tile = np.concatenate(tiles) if tiles else np.empty((0, 4), np.int64)
    tile = tile[np.argsort(-tile[:, 3], kind="stable")]
    walks = tile[:, 3]
    piece = max(MIN_PIECE, -(-int(walks.sum()) * 2 * -(-heads // MAX_HEADS) // multiprocessors))
    piece = -(-piece // 64) * 64
    counts = -(-walks // piece)
    owner = np.repeat(np.arange(len(tile)), counts)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
    # equal pieces, in multiples of 64
    size = (-(-walks // counts) + 63) // 64 * 64
    begin = np.minimum(number * size[owner], walks[owner])
    end = np.minimum(begin + size[owner], walks[owner])
    is_cut = counts > 1
    partial = np.where(is_cut[owner], np.cumsum(is_cut[owner]) - 1, -1)
    pieces = np.column_stack((tile[owner, :3], begin, end, partial))
    first_partial = np.cumsum(counts[is_cut]) - counts[is_cut]
    merges = np.column_stack((tile[is_cut, :2], first_partial, counts[is_cut]))

    return ExtendPlan(
        heads,
        pairs,
        num_queries,
        upload(pieces, np.int32, device),
        upload(merges, np.int32, device),
        int(counts[is_cut].sum()),
    )


@dataclass(frozen=True)
class Chunk:
    """Keys that are expanded together, of one sequence or several."""

    keys: int
    spans: Tensor
    """int32 [spans, 4]: first slot, keys, position of the first, place in the chunk."""
    longest_span: int
    pieces: Tensor
    """int32 [pieces, 6]: first query, queries, place of the first key, its position, keys, 1 to merge with what an
    earlier chunk left."""


@dataclass(frozen=True)
class ExpandedPlan:
    """Work of each program of the expanded kernel. The same for all layers."""

    num_queries: int
    """Queries of the flat batch, including those of other plans."""
    spans: list[tuple[int, int]]
    """First query and queries of each sequence."""
    chunks: list[Chunk]


def chunk_keys(heads: int, nope_dim: int, value_dim: int) -> int:
    """Keys per chunk, a multiple of 128."""
    return max(128, CHUNK_BYTES // (2 * heads * (nope_dim + value_dim)) // 128 * 128)


def plan_expanded(
    sequences: Sequence[tuple[int, int, np.ndarray]], num_queries: int, chunk: int, device: torch.device | str
) -> ExpandedPlan:
    """Lay out the work of a batch.

    Args:
        sequences: (first query in the flat batch, first slot in `slots`, int64 ascending positions of the queries).
        num_queries: queries of the flat batch.
        chunk: keys expanded at a time, from :func:`chunk_keys`.

    Raises:
        ValueError: a chunk under 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}; it must be at least 1")
    spans: list[list[tuple[int, int, int, int]]] = [[]]
    pieces: list[list[np.ndarray]] = [[]]
    room = chunk
    for first_query, first_slot, positions in sequences:
        ends = np.arange(len(positions), 0, -QUERIES)
        starts = np.maximum(ends - QUERIES, 0)
        length, begin = int(positions[-1]) + 1, 0
        while begin < length:
            if room == 0:
                spans.append([])
                pieces.append([])
                room = chunk
            taken = min(room, length - begin)
            place = chunk - room
            spans[-1].append((first_slot + begin, taken, begin, place))
            keys = np.minimum(positions[ends - 1] + 1 - begin, taken)
            columns = (first_query + starts, ends - starts, place, begin, keys, int(begin > 0))
            table = np.stack(np.broadcast_arrays(*columns), axis=1)
            pieces[-1].append(table[keys > 0])
            begin += taken
            room -= taken
    chunks = []
    for chunk_spans, tables in zip(spans, pieces, strict=True):
        if not chunk_spans:
            continue
        table = np.concatenate(tables)
        table = table[np.argsort(-table[:, 4], kind="stable")]
        span = np.array(chunk_spans)
        chunks.append(
            Chunk(
                int(span[:, 1].sum()),
                upload(span, np.int32, device),
                int(span[:, 1].max()),
                upload(table, np.int32, device),
            )
        )
    return ExpandedPlan(num_queries, [(first, len(p)) for first, _, p in sequences], chunks)


class DecodeTuning(NamedTuple):
    """How the decode kernel is launched for one shape."""

    block_h: int
    """Heads per block; fewer heads are padded."""
    block_n: int
    """Rows per tile."""
    num_warps: int
    num_stages: int


def plan_splits(batch: int, heads: int, max_length: int, num_sms: int, tune: DecodeTuning) -> int:
    """Number of splits per sequence that takes the least time, if starting a split costs as much as two tiles.

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
    """Size in float32 elements of :func:`decode_attention`'s `workspace`; 0 with one split."""
    return num_splits * batch * heads * (rank + 1) if num_splits > 1 else 0
