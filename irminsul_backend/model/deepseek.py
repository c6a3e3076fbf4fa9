"""The DeepSeek-V2/V3 decoder over a flat batch of tokens. It knows nothing of sequences, caches or sampling.

A batch is T tokens of any number of sequences, one after another. What a token may attend to is the business of the
AttentionContext, which also keeps the rows. Plain tensors instead of nn.Module: nothing here is trained.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from irminsul_kernels import rotate

from irminsul_backend.errors import InvalidRequestError, UnsupportedModelError
from irminsul_backend.model.dense import DenseContext
from irminsul_backend.model.model_config import ModelConfig
from irminsul_backend.model.moe import MLP, MoE
from irminsul_backend.model.progress import LoadProgress
from irminsul_backend.model.weights import Checkpoint

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

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        self.config, self.layer = config, layer
        name = f"layers.{layer}.attention"
        low_rank = config.q_lora_rank is not None
        self.down = checkpoint.read(f"{name}.down")
        self.q_norm = checkpoint.read(f"{name}.q_norm") if low_rank else None
        self.q_b = checkpoint.read(f"{name}.q_b") if low_rank else None
        self.kv_norm = checkpoint.read(f"{name}.kv_norm")
        self.w_uk, self.w_uv = checkpoint.read(f"{name}.w_uk"), checkpoint.read(f"{name}.w_uv")
        self.o = checkpoint.read(f"{name}.o")

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; cos and sin float32 [T, dr/2]"""
        c = self.config
        down = F.linear(x, self.down)
        query, latent, key = down.split((down.shape[1] - c.row_size, c.kv_lora_rank, c.qk_rope_head_dim), dim=1)
        if self.q_b is not None:
            query = F.linear(F.rms_norm(query, query.shape[-1:], self.q_norm, LATENT_EPS), self.q_b)
        query = query.unflatten(1, (c.num_heads, -1))
        q_nope, q_rope = query.split((c.qk_nope_head_dim, c.qk_rope_head_dim), dim=2)
        q_rope = rotate(q_rope, cos[:, None], sin[:, None]).to(x.dtype)
        if has_row_kernel(x):
            rows = _rows_by_kernel(down[:, -c.row_size :], self.kv_norm, cos, sin)
        else:
            latent = F.rms_norm(latent, latent.shape[-1:], self.kv_norm, LATENT_EPS)
            rows = torch.cat((latent, rotate(key, cos, sin).to(x.dtype)), dim=1)
        out = context.attend(self.layer, q_nope, q_rope, rows, self.w_uk, self.w_uv)
        return F.linear(out.reshape(out.shape[0], -1), self.o)


class DecoderLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint, layer: int) -> None:
        name = f"layers.{layer}"
        self.eps = config.rms_norm_eps
        self.input_norm = checkpoint.read(f"{name}.input_norm")
        self.post_norm = checkpoint.read(f"{name}.post_norm")
        self.attention = Attention(config, checkpoint, layer)
        self.feed_forward: MLP | MoE
        if config.is_moe_layer(layer):
            self.feed_forward = MoE(config, checkpoint, f"{name}.feed_forward")
        else:
            self.feed_forward = MLP(checkpoint, f"{name}.feed_forward")

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        x = x + self.attention(F.rms_norm(x, x.shape[-1:], self.input_norm, self.eps), cos, sin, context)
        return x + self.feed_forward(F.rms_norm(x, x.shape[-1:], self.post_norm, self.eps))


class MLAModel:
    """Embedding, decoder layers, head. Made by :func:`load_model`."""

    def __init__(self, config: ModelConfig, checkpoint: Checkpoint) -> None:
        self.config = config
        self.device, self.dtype = checkpoint.device, checkpoint.dtype
        # its turns lie on the device: a CUDA graph cannot fetch them from the host
        self._rope = replace(config.rope, inv_freq=config.rope.inv_freq.to(checkpoint.device))
        self.embedding = checkpoint.read("embedding")
        self.norm = checkpoint.read("norm")
        self.layers = [DecoderLayer(config, checkpoint, layer) for layer in range(config.num_layers)]
        self.head = self.embedding if config.tie_word_embeddings else checkpoint.read("head")

    @torch.inference_mode()
    def forward(self, token_ids: torch.Tensor, positions: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """Run T tokens, int64 `token_ids` [T] at int64 `positions` [T], through every layer.

        Returns the residual stream [T, hidden]; :meth:`compute_logits` takes the rows of it that want logits.
        """
        cos, sin = self._rope.cos_sin(positions)
        x = F.embedding(token_ids, self.embedding)
        for layer in self.layers:
            x = layer(x, cos, sin, context)
        return x

    @torch.inference_mode()
    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Rows [N, hidden] of :meth:`forward`'s result -> float32 [N, vocab]; the final norm is applied here."""
        return F.linear(F.rms_norm(hidden, hidden.shape[-1:], self.norm, self.config.rms_norm_eps), self.head).float()

    def logits(self, token_ids: torch.Tensor | list[int]) -> torch.Tensor:
        """float32 [n, vocab] after each of `token_ids` [n], one sequence from position 0, nothing cached.

        Raises InvalidRequestError for an empty sequence, one over max_position_embeddings, or an id out of vocabulary.
        """
        ids = torch.as_tensor(token_ids, dtype=torch.int64, device=self.device)
        limit, vocab = self.config.max_position_embeddings, self.config.vocab_size
        if ids.ndim != 1 or not 0 < ids.numel() <= limit:
            raise InvalidRequestError(f"token ids have shape {list(ids.shape)}; it must be [n] with 1 <= n <= {limit}")
        if ids.min() < 0 or ids.max() >= vocab:
            raise InvalidRequestError(f"token ids span {ids.min()}..{ids.max()}; they must be 0..{vocab - 1}")
        positions = torch.arange(ids.numel(), device=self.device)
        context = DenseContext(self.config, ids.numel(), self.device)
        return self.compute_logits(self.forward(ids, positions, context))


def load_model(folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> MLAModel:
    """Load a Hugging Face folder (config.json, *.safetensors) of the DeepSeek-V2/V3 family.

    Raises UnsupportedModelError if a file is missing, a config value is not understood, or the tensors do not fit.
    """
    if not Path(folder).is_dir():
        raise UnsupportedModelError(f"model folder {folder} does not exist")
    config = ModelConfig.load(folder)
    checkpoint = Checkpoint(folder, config, torch.device(device), dtype)
    what = f"loading {Path(folder).resolve().name} to {device}"
    with torch.inference_mode(), LoadProgress(checkpoint.num_bytes, what) as progress:
        checkpoint.on_read = progress.advance
        return MLAModel(config, checkpoint)
