"""Rotary position embedding: frequencies (plain or YaRN) and exact angles. The rotation is irminsul_kernels.rotate.

Layout: everything here is **half-split**: dimension i is paired with i + dr/2. Published DeepSeek checkpoints pair
2i with 2i + 1; ``weights.half_split_rows`` reorders their projections once at load, so no forward pass ever permutes.
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
    def _turns(self) -> torch.Tensor:
        return turns_per_position(self.inv_freq)

    def cos_sin(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [T, dr/2], of int64 `positions` [T] for a first rotation: the attention factor is in."""
        cos, sin = cos_sin(positions, self._turns.to(positions.device))
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
    theta = _number(scaling, name, "rope_theta", raw.get("rope_theta", DEFAULT_THETA))
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    plain = theta**-exponents
    if kind in ("default", None):
        return Rope(plain)
    if kind != "yarn":
        raise UnsupportedModelError(f"config.json: {name}.type is {kind!r}; only 'yarn' and 'default' are understood")
    if unknown := sorted(set(scaling) - YARN_FIELDS):
        raise UnsupportedModelError(f"config.json: {name}.{unknown[0]} is {scaling[unknown[0]]!r}; not understood")
    factor = _number(scaling, name, "factor")
    trained = _number(scaling, name, "original_max_position_embeddings")
    low, high = (
        dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))
        for rotations in (_number(scaling, name, "beta_fast", 32), _number(scaling, name, "beta_slow", 1))
    )
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2, dtype=torch.float64) - low) / ((high - low) or 0.001)).clamp(0, 1)
    all_dim = _number(scaling, name, "mscale_all_dim", 0)
    attention_factor = _mscale(factor, _number(scaling, name, "mscale", 1)) / _mscale(factor, all_dim)
    return Rope(
        plain * (1 - ramp) + plain / factor * ramp,
        _number(scaling, name, "attention_factor", attention_factor),
        _mscale(factor, all_dim) ** 2,
    )


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _number(scaling: Mapping[str, Any], name: str, key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise UnsupportedModelError(f"config.json: {name}.{key} is {value!r}; it must be a number, at least 0")
    return float(value)
