"""ModelConfig: the sizes and switches of one MLA model, whatever its family; each family's file reads its own."""

from __future__ import annotations

import math
from dataclasses import dataclass

from irminsul_backend.model.rope import Rope


@dataclass(frozen=True, eq=False)
class ModelConfig:
    """Sizes and switches of one model. Names follow config.json, but for num_layers and num_heads."""

    architecture: str
    """Its name in the register."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    max_position_embeddings: int
    """Most positions the model may see: prompt plus output, in tokens."""
    rms_norm_eps: float
    tie_word_embeddings: bool
    kv_lora_rank: int
    """R: width of c_KV."""
    q_lora_rank: int | None
    """Width of the query's low-rank bottleneck; None = one full projection."""
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    rope: Rope
    rope_interleave: bool
    """True where the checkpoint pairs rotary dimensions 2i and 2i + 1 (all published ones)."""
    n_routed_experts: int
    """0 = every layer is dense."""
    n_shared_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    first_k_dense_replace: int
    moe_layer_freq: int
    topk_method: str
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    num_nextn_predict_layers: int
    """Extra prediction layers after the model's own; their weights are not used."""
    weight_block_size: tuple[int, int] | None
    """Block shape of float8 weights with one float32 scale a block; None = plain weights."""

    @property
    def row_size(self) -> int:
        """Elements of one cached row: c_KV, then k_r."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of q·k before the softmax; YaRN's mscale² is in it."""
        return math.pow(self.qk_nope_head_dim + self.qk_rope_head_dim, -0.5) * self.rope.softmax_factor

    def is_moe_layer(self, layer: int) -> bool:
        """Whether the layer's feed-forward block is a mixture of experts."""
        moe = self.n_routed_experts > 0
        return moe and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
