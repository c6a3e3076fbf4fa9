"""`irminsul eval rotation`: what moving a cached row costs in precision, by the way it is moved.

A row's d RoPE features are rotated by δ when the row moves (irminsul_kernels.ops.rotation). All errors are against
float64, over rows of random numbers at random positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from irminsul_kernels import cos_sin, rotate
from torch import Tensor

from irminsul_backend.hub.config_fields import FieldReader
from irminsul_backend.model.rope import Rope, read_rope

DIM, NOPE_DIM = 64, 128
"""qk_rope_head_dim and qk_nope_head_dim of DeepSeek-V2 and V3."""
FARTHEST = 131_072
"""Largest |δ|, in positions."""
ROWS, SOME_MOVES, MANY_MOVES = 2048, 9, 1000
PAPER = 4.7e-3
"""Relative L2 error after a move that the paper reports (arXiv 2605.05696)."""
BAR = 1.7e-3

ROPES: dict[str, dict[str, Any]] = {
    "plain": {"rope_theta": 10000.0},
    "yarn": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
    },
}
"""Plain RoPE, and YaRN as in DeepSeek-V2-Lite's config.json."""

FRESH, OURS, OURS_OFTEN = "fresh", "on_load", f"on_load_{MANY_MOVES}"
WAYS = {
    FRESH: "computed at its position, kept in bf16 (no move)",
    OURS: "Irminsul: stored bf16 row, rotated in fp32 on the way in",
    OURS_OFTEN: f"Irminsul, moved {MANY_MOVES:,} times",
    "rounded": "rotated in fp32, rounded to bf16 again",
    "bf16": "cos, sin and arithmetic in bf16",
    f"in_place_{SOME_MOVES}": f"re-rotated in place {SOME_MOVES} times",
    f"in_place_{MANY_MOVES}": f"re-rotated in place {MANY_MOVES:,} times",
}
"""Ways of getting a row to its position, and what they are called."""


class Rows(NamedTuple):
    """Random rows, and where they are moved."""

    plain: Tensor
    """float64 [n, d], before any rotation."""
    stored: Tensor
    """bfloat16 [n, d], rotated for `base`."""
    base: Tensor
    """int64 [n]"""
    stops: Tensor
    """int64 [MANY_MOVES, n], positions the rows are moved to one after the other; every move's |δ|, and the last
    stop's from the base, is at most FARTHEST."""


def measure(rows: int = ROWS, seed: int = 0, on_done: Callable[[int], object] = lambda n: None) -> dict[str, Any]:
    """Errors of every way of WAYS, for each of ROPES.

    Args:
        rows: rows to move.
        on_done: called for every move of the `MANY_MOVES` ones, len(ROPES) * MANY_MOVES times in all.

    Returns:
        JSON values: `ropes`, by rope and way the `relative_l2` error of all rows, that of the worst row, and
        `max_score_error`, the largest change of an attention score (a logit) under random queries; the paper's figure;
        and whether moving `MANY_MOVES` times equals moving once, bit for bit.
    """
    ropes, equal = {}, True
    for name, config in ROPES.items():
        rope = read_rope(FieldReader(config), DIM)
        generator = torch.Generator().manual_seed(seed)
        sample = _sample(rope, rows, generator)
        moved = _moved(rope, sample, on_done)
        equal = equal and torch.equal(moved[OURS], moved[OURS_OFTEN])
        reference = rotate_exact(rope, sample.plain, sample.stops[-1])
        queries = torch.randn(rows, DIM, dtype=torch.float64, generator=generator) * rope.attention_factor
        scale = (NOPE_DIM + DIM) ** -0.5 * rope.softmax_factor
        ropes[name] = {way: errors(moved[way], reference, queries * scale) for way in WAYS}
    return {
        "paper_relative_l2": PAPER,
        "bar": BAR,
        "met": equal and all(by_way[OURS]["relative_l2"] <= BAR for by_way in ropes.values()),
        "moved_often_equals_moved_once": equal,
        "rows": rows,
        "farthest": FARTHEST,
        "ropes": ropes,
    }


def rotate_exact(rope: Rope, x: Tensor, positions: Tensor) -> Tensor:
    """A first rotation, attention factor included, in float64: x float64 [n, d], positions int64 [n]."""
    angle = positions.double().unsqueeze(-1) * rope.inv_freq
    cos, sin = torch.cos(angle) * rope.attention_factor, torch.sin(angle) * rope.attention_factor
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def errors(moved: Tensor, reference: Tensor, queries: Tensor) -> dict[str, float]:
    """Errors of `moved`, any float dtype, [n, d]; `reference` and `queries` (softmax scale included) are float64."""
    off = moved.double() - reference
    return {
        "relative_l2": float(off.norm() / reference.norm()),
        "worst_row_relative_l2": float((off.norm(dim=1) / reference.norm(dim=1)).max()),
        "max_score_error": float((queries * off).sum(dim=1).abs().max()),
    }


def _sample(rope: Rope, n: int, generator: torch.Generator) -> Rows:
    plain = torch.randn(n, DIM, dtype=torch.float64, generator=generator)
    base = torch.randint(0, FARTHEST, (n,), generator=generator)
    # both ends of every move lie in [0, FARTHEST], so that no |δ| is more; the extremes are among them
    stops = torch.randint(0, FARTHEST + 1, (MANY_MOVES, n), generator=generator)
    base[0], base[1], stops[-1, 0], stops[-1, 1] = 0, FARTHEST, FARTHEST, 0
    return Rows(plain, rotate_exact(rope, plain, base).bfloat16(), base, stops)


def _moved(rope: Rope, rows: Rows, on_done: Callable[[int], object]) -> dict[str, Tensor]:
    """The rows at their last stop, by way."""
    last = rows.stops[-1]
    once = rotate(rows.stored, *cos_sin(last - rows.base, rope.turns))
    loaded, in_place, at, some = once, rows.stored, rows.base, rows.stored
    for move, stop in enumerate(rows.stops, 1):
        # read only: the stored row and its base position stay what they are, so a move leaves nothing behind
        loaded = rotate(rows.stored, *cos_sin(stop - rows.base, rope.turns))
        if move == SOME_MOVES:
            some = _rounded(rope, in_place, last - at)
        in_place, at = _rounded(rope, in_place, stop - at), stop
        on_done(1)
    cos, sin = (table.bfloat16() for table in cos_sin(last - rows.base, rope.turns))
    a, b = rows.stored.chunk(2, dim=-1)
    return {
        FRESH: rotate_exact(rope, rows.plain, last).bfloat16(),
        OURS: once,
        OURS_OFTEN: loaded,
        "rounded": once.bfloat16(),
        "bf16": torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1),
        f"in_place_{SOME_MOVES}": some,
        f"in_place_{MANY_MOVES}": in_place,
    }


def _rounded(rope: Rope, rows: Tensor, delta: Tensor) -> Tensor:
    return rotate(rows, *cos_sin(delta, rope.turns)).bfloat16()
