"""Random weights that behave like a model where a cache can tell the difference: for tests and benchmarks.

- attention scores have a standard deviation of about 2, so far tokens with a matching key weigh in;
- lower blocks add little to the residual stream, so rows above layer 0 depend on their context, but mostly on their own
  token (c_KV moves by 5 to 8 % when a quarter of the context is replaced by random tokens);
- the last layer's attention is strong, so the next token depends on far context (half of them change in that case).
"""

from __future__ import annotations

import torch

from irminsul_backend.model.model_config import ModelConfig
from irminsul_backend.model.register import family_of

GAINS = {
    "embed_tokens": 1.0,
    "q_proj": 2.0,
    "o_proj": 0.3,
    "down_proj": 0.4,
    "lm_head": 2.5,
}
"""Standard deviation of each matrix's output for unit input; 1 where not named. Embedding: of its entries."""
LAST_ATTENTION_GAIN = 2.0
"""o_proj of the last layer: an average over many values is small, and this makes up for it."""


def random_weights(config: ModelConfig, seed: int) -> dict[str, torch.Tensor]:
    """bfloat16 tensors by published name; the same for the same seed, within a rounding between processors."""
    generator = torch.Generator().manual_seed(seed)
    last = f"model.layers.{config.num_layers - 1}.self_attn.o_proj"
    weights = {}
    for name, shape in family_of(config).expected_shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape, dtype=torch.bfloat16)
            continue
        kind = name.split(".")[-2]
        gain = LAST_ATTENTION_GAIN if name.startswith(last) else GAINS.get(kind, 1.0)
        std = gain if kind == "embed_tokens" else gain * shape[1] ** -0.5
        weights[name] = (torch.randn(shape, generator=generator) * std).to(torch.bfloat16)
    return weights
