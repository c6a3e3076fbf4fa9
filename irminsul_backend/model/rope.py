"""Rotary position embedding: frequencies (plain or YaRN) and exact angles. The rotation is irminsul_kernels.rotate.

Layout: everything here is **half-split**: dimension i is paired with i + dr/2. Published DeepSeek checkpoints pair
2i with 2i + 1; ``weights.copy_rotary`` reorders their projections once at load, so no forward pass ever permutes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from irminsul_kernels import cos_sin, turns_per_position

from irminsul_backend.errors import UnsupportedModelError

DEFAULT_THETA = 10_000.0
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


def rope_from_config(raw: Mapping[str, Any], dim: int) -> Rope:
    """Build the rotation of `dim` dimensions from a parsed config.json.

    Reads `rope_theta` + `rope_scaling`, or the newer `rope_parameters` that holds both. YaRN follows the published
    DeepSeek code: attention factor = mscale(factor, mscale) / mscale(factor, mscale_all_dim), with 1 and 0 for
    missing fields, and softmax scale times mscale(factor, mscale_all_dim)². (`transformers` agrees whenever both
    fields are present and not 0, or both are absent; with only one it takes mscale(factor, 1) instead.) An explicit
    `attention_factor` wins. Raises UnsupportedModelError naming field and value for any other type or field.
    """
    name = "rope_parameters" if raw.get("rope_parameters") else "rope_scaling"
    scaling = raw.get(name) or {}
    if not isinstance(scaling, Mapping):
        raise UnsupportedModelError(f"config.json: {name} is {scaling!r}; it must be an object or null")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    nested = scaling.get("rope_theta") is not None
    theta = _number(scaling if nested else raw, f"{name}." if nested else "", "rope_theta", DEFAULT_THETA, over=1)
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    plain = theta**-exponents
    if kind in ("default", None):
        return Rope(plain)
    if kind != "yarn":
        raise UnsupportedModelError(f"config.json: {name}.type is {kind!r}; only 'yarn' and 'default' are understood")
    if unknown := sorted(set(scaling) - YARN_FIELDS):
        raise UnsupportedModelError(f"config.json: {name}.{unknown[0]} is {scaling[unknown[0]]!r}; not understood")

    def number(key: str, default: float | None = None, over: float | None = None) -> float:
        return _number(scaling, f"{name}.", key, default, over)

    factor, trained = number("factor", over=0), number("original_max_position_embeddings", over=0)
    low, high = (
        dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (number("beta_fast", 32, over=0), number("beta_slow", 1, over=0))
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)).clamp(0, 1)
    all_dim = _mscale(factor, number("mscale_all_dim", 0))
    attention_factor = number("attention_factor", _mscale(factor, number("mscale", 1)) / all_dim, over=0)
    return Rope(plain * (1 - ramp) + plain / factor * ramp, attention_factor, all_dim**2)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _number(
    values: Mapping[str, Any], where: str, key: str, default: float | None = None, over: float | None = None
) -> float:
    value: Any = default if values.get(key) is None else values[key]
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or (value < 0 if over is None else value <= over):
        limit = "at least 0" if over is None else f"over {over}"
        raise UnsupportedModelError(f"config.json: {where}{key} is {value!r}; it must be a number {limit}")
    return float(value)
