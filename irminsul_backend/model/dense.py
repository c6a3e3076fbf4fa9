"""DenseContext: one sequence, all of it in one batch, nothing kept. Serves MLAModel.logits and the tests."""

from __future__ import annotations

import numpy as np
import torch
from irminsul_kernels import build_layout, mla_attention

from irminsul_backend.model.model_config import ModelConfig


class DenseContext:
    """Causal attention of a batch over its own rows, which lie at their base positions: no row is moved."""

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
