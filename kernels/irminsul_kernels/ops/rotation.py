"""RoPE rotation by a position difference, exact at any distance.

Layout is half-split: feature i pairs with feature i + d/2. `R(δ) k(p) = k(p + δ)`, so a row that was rotated for its
base position moves to another one by a rotation of its d RoPE features alone. The rotation by δ is unscaled: an
attention factor (YaRN) is part of k(p) already.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_TURN = 1 << 64


def turns_per_position(inv_freq: Tensor) -> Tensor:
    """Angular step per position as a fraction of a turn, in units of 2^-64 turns.

    Args:
        inv_freq: float64 [d/2], radians per position (YaRN already applied).

    Returns:
        int64 [d/2]; `position * step` wraps modulo 2^64, a whole turn, so large positions lose no precision.

    Raises:
        ValueError: inv_freq is not float64.
    """
    if inv_freq.dtype != torch.float64:
        raise ValueError(f"inv_freq must be float64, not {inv_freq.dtype} (off by 5e-3 rad at 131,072)")
    steps = [round(f / (2 * math.pi) * _TURN) % _TURN for f in inv_freq.tolist()]
    return torch.tensor([s - _TURN if s >= _TURN // 2 else s for s in steps], dtype=torch.int64, device=inv_freq.device)


def cos_sin(positions: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * inv_freq, error below 4e-7 at any position.

    Args:
        positions: int64 [...], positions or differences, any sign.
        turns: int64 [d/2] from :func:`turns_per_position`.

    Returns:
        Two float32 tensors [..., d/2].
    """
    # the int64 product wraps at a whole turn; its top 32 bits are the angle
    phase = (positions.unsqueeze(-1) * turns) >> 32
    angle = phase.to(torch.float32) * (2 * math.pi / (1 << 32))
    return torch.cos(angle), torch.sin(angle)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs of half-split features.

    Args:
        x: [..., d], any float dtype.
        cos, sin: float32, broadcastable to [..., d/2].

    Returns:
        float32 [..., d] (the caller decides whether and when to round).
    """
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
