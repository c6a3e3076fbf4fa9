"""Rotary position embedding: frequencies (plain or YaRN) and exact angles. The rotation is irminsul_kernels.rotate.

Layout: everything here is **half-split**: dimension i is paired with i + dr/2. Published DeepSeek checkpoints pair
2i with 2i + 1; ``layout.copy_rotary`` reorders their projections once at load, so no forward pass ever permutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from irminsul_kernels import cos_sin, turns_per_position

from irminsul_backend.hub.config_fields import FieldReader

DEFAULT_THETA = 10_000.0
PLAIN_FIELDS = {"type", "rope_type", "rope_theta"}
YARN_FIELDS = {
    "type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
    "mscale", "mscale_all_dim", "attention_factor", "truncate",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Rope:
    """The rotation of one model."""

    inv_freq: torch.Tensor
    """float64 [dr/2], radians per position; YaRN's interpolation is already in it."""
    attention_factor: float = 1.0
    """Multiplies cos and sin when a row or query is rotated for the first time. Moving a row by δ is unscaled."""
    softmax_factor: float = 1.0
    """YaRN's mscale², a factor of the softmax scale."""

    @cached_property
    def turns(self) -> torch.Tensor:
        """int64 [dr/2], `inv_freq` in exact fractions of a turn."""
        return turns_per_position(self.inv_freq)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [T, dr/2], of int64 `positions` [T] for a first rotation: the attention factor is in."""
        cos, sin = cos_sin(positions, self.turns.to(positions.device))
        return cos * self.attention_factor, sin * self.attention_factor


def read_rope(read: FieldReader, dim: int) -> Rope:
    """Build the rotation of `dim` dimensions from config.json; what is not understood becomes a problem of `read`.

    Reads `rope_theta` + `rope_scaling`, or the newer `rope_parameters` that holds both. YaRN follows the published
    DeepSeek code: attention factor = mscale(factor, mscale) / mscale(factor, mscale_all_dim), with 1 and 0 for
    missing fields, and softmax scale times mscale(factor, mscale_all_dim)². (`transformers` agrees whenever both
    fields are present and not 0, or both are absent; with only one it takes mscale(factor, 1) instead.) An explicit
    `attention_factor` wins.
    """
    name = "rope_parameters" if read.value("rope_parameters") else "rope_scaling"
    scaling = read.value(name, {})
    if not isinstance(scaling, Mapping):
        read.refuse(name, "it must be an object or null")
        scaling = {}
    if name == "rope_parameters" and read.value("rope_scaling", scaling) != scaling:
        read.refuse("rope_scaling", "rope_parameters is there too and says something else; keep one of them")
    inner = FieldReader(scaling, f"{name}.", read.problems)
    nested = scaling.get("rope_theta") is not None
    theta = (inner if nested else read).number("rope_theta", DEFAULT_THETA, over=1)
    if nested and read.value("rope_theta", theta) != scaling["rope_theta"]:
        read.refuse("rope_theta", f"{name}.rope_theta says {theta}; keep one of them")
    kind = inner.value("rope_type", inner.value("type", "default"))
    plain = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    if kind not in ("default", "yarn") or inner.value("type", kind) != kind:
        inner.refuse("type", "only 'yarn' and 'default' are understood", kind)
        return Rope(plain)
    for key in sorted(set(scaling) - (YARN_FIELDS if kind == "yarn" else PLAIN_FIELDS)):
        if scaling[key] is not None:
            inner.refuse(key, f"not understood with type {kind!r}")
    return Rope(plain) if kind == "default" else _yarn(inner, plain, theta, dim)


def _yarn(read: FieldReader, plain: torch.Tensor, theta: float, dim: int) -> Rope:
    """Frequencies between `plain` and `plain` / factor, by how often each turns within the trained length."""
    factor, trained = read.number("factor"), read.number("original_max_position_embeddings")
    low, high = (
        dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (read.number("beta_fast", 32), read.number("beta_slow", 1))
    )
    if read.boolean("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)).clamp(0, 1)
    all_dim = _mscale(factor, read.number("mscale_all_dim", 0, over=None))
    attention_factor = read.number("attention_factor", _mscale(factor, read.number("mscale", 1, over=None)) / all_dim)
    return Rope(plain * (1 - ramp) + plain / factor * ramp, attention_factor, all_dim**2)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
