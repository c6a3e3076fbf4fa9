"""Multi-head latent attention: the projections around an AttentionContext, which knows who attends to whom.

A batch is T tokens of any number of sequences, one after another. What a token may attend to is the business of the
AttentionContext, which also keeps the rows.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from irminsul_kernels import build_layout, mla_attention, rotate

from irminsul_backend.model.checkpoint import TensorSource
from irminsul_backend.model.model_config import ModelConfig

LATENT_EPS = 1e-6
"""Epsilon of q_a_layernorm and kv_a_layernorm: the published code keeps its default there, whatever rms_norm_eps is."""

HAS_TRITON = find_spec("triton") is not None


class AttentionContext(Protocol):
    """Who attends to whom in one batch. Called once a layer, in order."""

    def attend(
        self,
        layer: int,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        rows: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
    ) -> torch.Tensor:
        """Keep the batch's `rows` and return the attention output [T, H, dv].

        q_nope [T, H, dn]; q_rope [T, H, dr], rotated at the token's position; rows [T, R + dr]: c_KV after its norm,
        then k_r rotated at the token's position; w_uk [H, dn, R] and w_uv [H, R, dv] lead in and out of the latent
        space. q and k_r are half-split and carry the attention factor; the softmax scale is not applied yet.
        """
        ...


class DenseContext:
    """One sequence, all of it in one batch, nothing kept: causal attention of a batch over its own rows.

    The rows lie at their base positions, so none is moved.
    """

    def __init__(self, config: ModelConfig, length: int, device: torch.device) -> None:
        self.scale = config.softmax_scale
        positions = np.arange(length)
        slots = positions.astype(np.int32)
        self.layout = build_layout([slots], slots, [positions], config.rope.turns, device=device)

    def attend(
        self,
        layer: int,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        rows: torch.Tensor,
        w_uk: torch.Tensor,
        w_uv: torch.Tensor,
    ) -> torch.Tensor:
        """See AttentionContext.attend; every layer is alike."""
        return mla_attention(q_nope, q_rope, rows, self.layout, w_uk, w_uv, self.scale)


def has_row_kernel(x: torch.Tensor) -> bool:
    """Whether one kernel makes new rows: on a GPU, where a dozen small operations cost more than their arithmetic."""
    return x.is_cuda and HAS_TRITON


def _rows_by_kernel(kv: torch.Tensor, norm: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """kv [T, R + dr], as it is projected -> rows [T, R + dr]: c_KV after its norm, then k_r rotated."""
    from irminsul_kernels.ops.norm import write_rows

    rows = kv.new_empty(kv.shape)
    places = torch.arange(len(kv), dtype=torch.int32, device=kv.device)
    write_rows(kv, norm, cos, sin, places, rows, LATENT_EPS)
    return rows


class Attention:
    """Projections of multi-head latent attention around AttentionContext.attend."""

    def __init__(self, config: ModelConfig, source: TensorSource, layer: int) -> None:
        self.config, self.layer = config, layer
        name = f"layers.{layer}.attention"
        low_rank = config.q_lora_rank is not None
        self.down = source.read(f"{name}.down")
        self.q_norm = source.read(f"{name}.q_norm") if low_rank else None
        self.q_b = source.read(f"{name}.q_b") if low_rank else None
        self.kv_norm = source.read(f"{name}.kv_norm")
        self.w_uk, self.w_uv = source.read(f"{name}.w_uk"), source.read(f"{name}.w_uv")
        self.o = source.read(f"{name}.o")

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; cos and sin float32 [T, dr/2]"""
        c = self.config
        down = F.linear(x, self.down)
        widths = [down.shape[1] - c.row_size, c.kv_lora_rank, c.qk_rope_head_dim]
        query, latent, key = torch.split(down, widths, dim=1)
        if self.q_b is not None:
            query = F.linear(F.rms_norm(query, query.shape[-1:], self.q_norm, LATENT_EPS), self.q_b)
        heads = query.view(len(x), c.num_heads, c.qk_nope_head_dim + c.qk_rope_head_dim)
        q_nope, q_rope = torch.split(heads, [c.qk_nope_head_dim, c.qk_rope_head_dim], dim=2)
        q_rope = rotate(q_rope, cos[:, None], sin[:, None]).to(x.dtype)
        if has_row_kernel(x):
            rows = _rows_by_kernel(down[:, -c.row_size :], self.kv_norm, cos, sin)
        else:
            latent = F.rms_norm(latent, latent.shape[-1:], self.kv_norm, LATENT_EPS)
            rows = torch.cat((latent, rotate(key, cos, sin).to(x.dtype)), dim=1)
        out = context.attend(self.layer, q_nope, q_rope, rows, self.w_uk, self.w_uv)
        return F.linear(out.reshape(out.shape[0], -1), self.o)
