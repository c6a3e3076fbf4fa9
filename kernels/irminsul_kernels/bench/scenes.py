"""Batches of sequences over a pool of random rows, with every pattern of δ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from irminsul_kernels.ops.rotation import turns_per_position

RANK, ROPE, NOPE, VALUE = 512, 64, 128, 128
"""Sizes of every published model."""
SCALE = (NOPE + ROPE) ** -0.5
FARTHEST = 131_072
RUN = (200, 1000)
"""Shortest and longest run of rows that lie together and were moved together."""
PATTERNS = {
    "δ = 0": "every row at its own place",
    "δ per run": "runs of 200 to 1,000 rows, each moved by its own distance",
    "δ per row": "every row moved by a distance of its own",
}


def deltas(pattern: str, run_ends: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """int64 [run_ends[-1]], the distance δ by which each row was moved; |δ| <= FARTHEST."""
    length = int(run_ends[-1])
    if pattern == "δ = 0":
        return np.zeros(length, np.int64)
    if pattern == "δ per row":
        return rng.integers(-FARTHEST, FARTHEST + 1, length)
    each = rng.integers(-FARTHEST, FARTHEST + 1, len(run_ends))
    return np.repeat(each, np.diff(run_ends, prepend=0))


def cut_runs(length: int, rng: np.random.Generator) -> np.ndarray:
    """int64 ends of random runs over `length` rows."""
    ends = np.cumsum(rng.integers(*RUN, length // RUN[0] + 1))
    return np.append(ends[ends < length], length)


@dataclass(frozen=True)
class Scene:
    """Sequences with rows of their own. Slots are consecutive inside a run; the runs of all lie in random order."""

    lengths: list[int]
    rows: Tensor
    """[capacity, RANK + ROPE]; rows of no sequence are NaN."""
    slots: Tensor
    """int32 [sum of lengths]"""
    kv_indptr: Tensor
    """int32 [sequences + 1]"""
    bases: dict[str, Tensor]
    """int32 [capacity] by pattern."""
    turns: Tensor

    @property
    def keys(self) -> int:
        return sum(self.lengths)

    @property
    def first_slots(self) -> list[int]:
        return [0, *np.cumsum(self.lengths)[:-1].tolist()]

    def queries(self, tokens: int, heads: int, *widths: int) -> list[Tensor]:
        """Random [tokens, heads, width] of each width."""
        generator = torch.Generator(self.rows.device).manual_seed(tokens + heads)
        return [
            torch.randn(tokens, heads, width, generator=generator, device=self.rows.device).to(self.rows.dtype)
            for width in widths
        ]


def make_scene(
    lengths: Sequence[int],
    device: torch.device | str,
    dtype: torch.dtype = torch.bfloat16,
    patterns: Sequence[str] = tuple(PATTERNS),
    seed: int = 0,
    spare: int = 64,
) -> Scene:
    """Sequences of `lengths` in a pool with `spare` unused slots."""
    rng = np.random.default_rng(seed)
    capacity = sum(lengths) + spare
    runs = [cut_runs(length, rng) for length in lengths]
    run_lengths = np.concatenate([np.diff(ends, prepend=0) for ends in runs])
    order = rng.permutation(len(run_lengths))
    starts = np.empty(len(order), np.int64)
    starts[order] = spare + np.cumsum(run_lengths[order]) - run_lengths[order]
    offsets = np.cumsum(run_lengths) - run_lengths
    slots = np.repeat(starts - offsets, run_lengths) + np.arange(run_lengths.sum())
    positions = np.concatenate([np.arange(length) for length in lengths])
    bases = {}
    for pattern in patterns:
        base = np.zeros(capacity, np.int32)
        base[slots] = positions - np.concatenate([deltas(pattern, ends, rng) for ends in runs])
        bases[pattern] = torch.from_numpy(base).to(device)
    generator = torch.Generator(device).manual_seed(seed)
    rows = torch.randn(capacity, RANK + ROPE, generator=generator, device=device, dtype=torch.float32).to(dtype)
    rows[:spare] = float("nan")
    inv_freq = 10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
    return Scene(
        list(lengths),
        rows,
        torch.from_numpy(slots.astype(np.int32)).to(device),
        torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32)).to(device),
        bases,
        turns_per_position(inv_freq).to(device),
    )


def causal_pairs(positions: np.ndarray) -> int:
    """Query-key pairs of queries at `positions`: each sees the keys up to its own."""
    return int((positions + 1).sum())


def absorbed_flops(heads: int, pairs: int) -> int:
    """FLOPs of attention in latent space: scores over R + d, values over R."""
    return 2 * heads * (2 * RANK + ROPE) * pairs


def expanded_flops(heads: int, pairs: int, keys: int) -> int:
    """FLOPs of attention on expanded keys and values, including the expansion of `keys`."""
    return 2 * heads * (NOPE + ROPE + VALUE) * pairs + 2 * RANK * heads * (NOPE + VALUE) * keys


def decode_bytes(batch: int, heads: int, keys: int, itemsize: int = 2) -> int:
    """Bytes that decode must move: rows, a slot and a base position per key, queries and outputs."""
    return keys * ((RANK + ROPE) * itemsize + 8) + batch * heads * (2 * RANK + ROPE) * itemsize
