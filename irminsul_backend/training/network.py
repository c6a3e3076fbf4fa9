"""The architecture of `irminsul_backend.model` once more, batched and differentiable, for training alone.

A function of the parameters by their published names, so that what is trained is saved as it is. It covers what the
shipped model uses: no q_lora, softmax scores, greedy routing, plain RoPE.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from irminsul_backend.model.attention import LATENT_EPS
from irminsul_backend.model.deepseek import expected_shapes
from irminsul_backend.model.model_config import ModelConfig

SHORT = 512
"""Sequences up to this length compute their scores as one matrix."""
COMMON = 1.0
"""Length of the direction that all embeddings begin with in common, against their own parts."""
OFFSETS = (1, 2, 4, 9)
"""Tokens back that the first layer's heads begin by looking at: where a question, a fact or a bridge has its names."""
OFFSET_GAIN = 8.0
"""How sharply the first layer's heads begin by looking at one place: about 0.9 of the weight lies there."""


def initial_weights(config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """float32 by published name: random, but for two choices that make retrieval learnable within minutes.

    The head begins as the embedding (untied), so what attention copies is what it says. The first layer's heads
    begin by looking OFFSETS tokens back: their rotary queries and keys answer to a direction that all embeddings share.
    The other layers begin with no rotary scores: they compare content, wherever it stands. Without these choices the
    model was still guessing among the prompt's facts after 130 steps of 4,096 tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        into_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = 1.0 if "embed" in name else shape[1] ** -0.5 * (0.3 if into_residual else 1.0)
        weights[name] = torch.randn(shape, generator=generator) * std
    embedding = weights["model.embed_tokens.weight"]
    weights["lm_head.weight"] = embedding * config.hidden_size**-0.5
    common = COMMON * torch.randn(config.hidden_size, generator=generator)
    weights["model.embed_tokens.weight"] = embedding + common
    _set_places(config, weights, common)
    return weights


def _set_places(config: ModelConfig, weights: dict[str, Tensor], common: Tensor) -> None:
    """Make the first layer's heads prefer the key OFFSETS positions back, and no other layer any position.

    With key features a_i (1, 0) and query features a_i (cos m f_i, sin m f_i), rotated for positions k and q, the score
    is sum a_i^2 cos((q - k + m) f_i): greatest at k = q + m. High frequencies weigh more, which makes the peak narrow.
    """
    rope, pairs = config.qk_rope_head_dim, config.qk_rope_head_dim // 2
    # a normalised embedding has about unit features: scale so that its common part gives 1
    reader = common / common.square().sum() * (1 + COMMON**2) ** 0.5
    gain = OFFSET_GAIN * torch.exp(-torch.arange(pairs) / (0.1875 * pairs))
    queries = [
        weights[f"model.layers.{layer}.self_attn.q_proj.weight"].view(config.num_heads, -1, config.hidden_size)
        for layer in range(config.num_layers)
    ]
    for content in queries[1:]:
        content[:, -rope:] = 0
    queries[0][:, :-rope] *= 0.1  # content would blur the places
    query = queries[0][:, -rope:]
    key = weights["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"][-rope:]
    query *= 0.3
    key *= 0.3
    key[0::2] += gain[:, None] * reader
    for head in range(config.num_heads):
        turn = -OFFSETS[head % len(OFFSETS)] * config.rope.inv_freq.float()
        query[head, 0::2] += (gain * turn.cos())[:, None] * reader
        query[head, 1::2] += (gain * turn.sin())[:, None] * reader


class Network:
    """Forward pass over [B, T] token ids from position 0; `balance` gathers the routers' load-balancing loss."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        self.balance = torch.zeros(())

    def hidden(self, token_ids: Tensor) -> Tensor:
        """int64 [B, T] -> [B, T, hidden], after the final norm"""
        w, eps = self.weights, self.config.rms_norm_eps
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        cos, sin = self.config.rope.cos_sin(positions)
        x = F.embedding(token_ids, w["model.embed_tokens.weight"])
        self.balance = x.new_zeros(())
        for layer in range(self.config.num_layers):
            at = f"model.layers.{layer}."
            x = x + self._attention(_norm(x, w[at + "input_layernorm.weight"], eps), cos, sin, at + "self_attn.")
            normed = _norm(x, w[at + "post_attention_layernorm.weight"], eps)
            if self.config.is_moe_layer(layer):
                out = self._moe(normed.flatten(0, 1), at + "mlp.").view_as(x)
            else:
                out = self._mlp(normed, at + "mlp.")
            x = x + out
        return _norm(x, w["model.norm.weight"], eps)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weights["lm_head.weight"]).float()

    def _attention(self, x: Tensor, cos: Tensor, sin: Tensor, at: str) -> Tensor:
        c, w = self.config, self.weights
        nope, rope, value = c.qk_nope_head_dim, c.qk_rope_head_dim, c.v_head_dim
        query = F.linear(x, w[at + "q_proj.weight"]).unflatten(2, (c.num_heads, -1)).transpose(1, 2)
        q_nope, q_rope = query.split((nope, rope), dim=-1)
        latent, key = F.linear(x, w[at + "kv_a_proj_with_mqa.weight"]).split((c.kv_lora_rank, rope), dim=-1)
        latent = _norm(latent, w[at + "kv_a_layernorm.weight"], LATENT_EPS)
        expanded = F.linear(latent, w[at + "kv_b_proj.weight"]).unflatten(2, (c.num_heads, -1)).transpose(1, 2)
        k_nope, v = expanded.split((nope, value), dim=-1)
        k_rope = _rotate(key, cos, sin)[:, None].expand(-1, c.num_heads, -1, -1)
        q = torch.cat((q_nope, _rotate(q_rope, cos, sin)), dim=-1)
        k = torch.cat((k_nope, k_rope), dim=-1)
        if x.shape[1] <= SHORT:  # the fused kernel's backward pass is slow on short sequences on the CPU
            scores = (q @ k.transpose(-1, -2)).float() * c.softmax_scale
            causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            out = scores.masked_fill(~causal, float("-inf")).softmax(dim=-1).to(v.dtype) @ v
        else:
            # one width for keys and values: the fused kernels ask for it
            out = F.scaled_dot_product_attention(
                q, k, F.pad(v, (0, nope + rope - value)), is_causal=True, scale=c.softmax_scale
            )[..., :value]
        return F.linear(out.transpose(1, 2).flatten(2), w[at + "o_proj.weight"])

    def _mlp(self, x: Tensor, at: str) -> Tensor:
        w = self.weights
        gated = F.silu(F.linear(x, w[at + "gate_proj.weight"])) * F.linear(x, w[at + "up_proj.weight"])
        return F.linear(gated, w[at + "down_proj.weight"])

    def _moe(self, x: Tensor, at: str) -> Tensor:
        c = self.config
        scores = F.linear(x.float(), self.weights[at + "gate.weight"].float()).softmax(dim=-1)
        weights, experts = scores.topk(c.num_experts_per_tok, dim=-1)
        share = F.one_hot(experts, c.n_routed_experts).float().mean(dim=(0, 1))
        self.balance = self.balance + c.n_routed_experts * (share * scores.mean(dim=0)).sum()
        chosen = torch.zeros_like(scores).scatter(1, experts, weights)
        # Every expert sees every token and the unchosen ones count zero: few large products beat many small ones here.
        gate, up, down = (
            [self.weights[f"{at}experts.{expert}.{name}_proj.weight"] for expert in range(c.n_routed_experts)]
            for name in ("gate", "up", "down")
        )
        gated = F.silu(F.linear(x, torch.cat(gate))) * F.linear(x, torch.cat(up))
        gated = gated.unflatten(1, (c.n_routed_experts, -1)) * chosen[..., None].to(gated.dtype)
        return F.linear(gated.flatten(1), torch.cat(down, dim=1)) + self._mlp(x, at + "shared_experts.")


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], weight.to(x.dtype), eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[..., T, d] in the checkpoint's interleaved layout: features 2i and 2i + 1 are a pair."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
