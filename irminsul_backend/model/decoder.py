"""MLAModel: embedding, the family's layers and the head over a flat batch of tokens.

It knows nothing of sequences, caches or sampling. Plain tensors instead of nn.Module: nothing here is trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
import torch.nn.functional as F

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.model.attention import AttentionContext, DenseContext
from irminsul_backend.model.checkpoint import TensorSource
from irminsul_backend.model.model_config import ModelConfig


class Layer(Protocol):
    """One decoder layer."""

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; cos and sin float32 [T, dr/2]; calls context.attend once."""
        ...


class MLAModel:
    """Embedding, decoder layers, head. Made by :func:`irminsul_backend.model.loading.load_model`."""

    def __init__(self, config: ModelConfig, source: TensorSource, layers: Sequence[Layer]) -> None:
        self.config = config
        self.device, self.dtype = source.device, source.dtype
        # its turns lie on the device: a CUDA graph cannot fetch them from the host
        self._rope = replace(config.rope, inv_freq=config.rope.inv_freq.to(source.device))
        self.embedding = source.read("embedding")
        self.norm = source.read("norm")
        self.layers = layers
        self.head = self.embedding if config.tie_word_embeddings else source.read("head")

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
        """Return float32 [n, vocab] after each of `token_ids` [n], one sequence from position 0, nothing cached.

        Raises:
            InvalidRequestError: the sequence is empty or over max_position_embeddings, or an id is out of vocabulary.
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
