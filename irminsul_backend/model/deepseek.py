"""The DeepSeek family: V2 and V3, and what is published in their forms (Kimi-K2, Moonlight, JoyAI-LLM-Flash).

One architecture with switches, all in config.json: queries through a bottleneck or not, dense or MoE layers, three ways
of routing, plain RoPE or YaRN, plain weights or float8 blocks. V2 and V3 differ in their routing (ROUTINGS) alone.

What the register asks of a family's file is at its end: `read_config` reads config.json; `expected_shapes` and
`is_unused` say what a checkpoint holds; `sanitize` says which of it fills each of the model's tensors; `build` makes
the model of them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from functools import partial
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from irminsul_backend.hub.config_fields import MAX_POSITIONS, FieldReader
from irminsul_backend.model.attention import Attention, AttentionContext
from irminsul_backend.model.checkpoint import Shape, Source, TensorSource, Weight
from irminsul_backend.model.decoder import MLAModel
from irminsul_backend.model.float8 import read_block_size
from irminsul_backend.model.layout import copy_expert, copy_key_half, copy_rotary, copy_rows, copy_value_half
from irminsul_backend.model.model_config import ModelConfig
from irminsul_backend.model.moe import MLP, MoE
from irminsul_backend.model.rope import read_rope

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
ROUTINGS = {V2: {"greedy": "softmax", "group_limited_greedy": "softmax"}, V3: {"noaux_tc": "sigmoid"}}
"""topk_method -> scoring_func, by architecture; the first is the default."""
RELATED = (
    "attention_chunk_size", "attention_output_gate", "attn_logit_softcapping", "compress_ratios",
    "embedding_multiplier", "final_logit_softcapping", "hc_mult", "index_head_dim", "index_n_heads", "index_topk",
    "layer_types", "logits_scaling", "mla_scale_kv_lora", "mla_scale_q_lora", "mlp_layer_types", "n_hash_layers",
    "num_hash_layers", "residual_multiplier", "scale_emb", "sliding_window", "swiglu_limit", "text_config",
    "use_qk_norm", "use_sliding_window", "vision_config", "zero_expert_num",
)  # fmt: skip
"""Fields of related architectures that change the arithmetic without a tensor of their own, or with a part of the model
that is not served here; refused unless null, false or 0."""
FIELDS = frozenset({field.name for field in fields(ModelConfig)} | set(RELATED) | {
    "attention_bias", "hidden_act", "mlp_bias", "num_attention_heads", "num_hidden_layers", "num_key_value_heads",
    "quantization_config", "rope_parameters", "rope_scaling", "rope_theta", "scoring_func",
})  # fmt: skip
"""The fields of config.json that are read or refused here."""

MAX_LAYERS, MAX_EXPERTS, MAX_HEAD_DIM = 1_000, 10_000, 100_000
MAX_LAYER_EXPERTS = 200_000
"""Layers times experts, each of which is three tensors by name; the largest published models have 23,424."""


class DecoderLayer:
    """x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: ModelConfig, source: TensorSource, layer: int) -> None:
        name = f"layers.{layer}"
        self.eps = config.rms_norm_eps
        self.input_norm = source.read(f"{name}.input_norm")
        self.post_norm = source.read(f"{name}.post_norm")
        self.attention = Attention(config, source, layer)
        self.feed_forward: MLP | MoE
        if config.is_moe_layer(layer):
            self.feed_forward = MoE(config, source, f"{name}.feed_forward")
        else:
            self.feed_forward = MLP(source, f"{name}.feed_forward")

    def __call__(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]; cos and sin float32 [T, dr/2]"""
        x = x + self.attention(F.rms_norm(x, x.shape[-1:], self.input_norm, self.eps), cos, sin, context)
        return x + self.feed_forward(F.rms_norm(x, x.shape[-1:], self.post_norm, self.eps))


def build(config: ModelConfig, source: TensorSource) -> MLAModel:
    """Make the model of the tensors that :func:`sanitize` names."""
    return MLAModel(config, source, [DecoderLayer(config, source, layer) for layer in range(config.num_layers)])


def read_config(read: FieldReader, architecture: str) -> ModelConfig:
    """Read config.json of `architecture`; what is not understood becomes a problem of `read`."""
    for name in RELATED:
        if read.value(name):
            read.refuse(name, "models with this field are not understood")
    read.refuse_unless("hidden_act", ("silu",))
    read.refuse_unless("attention_bias", (False, None))
    read.refuse_unless("mlp_bias", (False, None))
    num_layers = read.integer("num_hidden_layers", at_most=MAX_LAYERS)
    num_heads = read.integer("num_attention_heads", at_most=MAX_HEAD_DIM)
    read.refuse_unless("num_key_value_heads", (num_heads, None))
    rope_dim = read.integer("qk_rope_head_dim", at_most=MAX_HEAD_DIM)
    if rope_dim % 2 and "qk_rope_head_dim" not in read.bad:
        read.refuse("qk_rope_head_dim", "it must be even")
    config = ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        hidden_size=read.integer("hidden_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        intermediate_size=read.integer("intermediate_size"),
        max_position_embeddings=read.integer("max_position_embeddings", at_most=MAX_POSITIONS),
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        tie_word_embeddings=read.boolean("tie_word_embeddings", False),
        kv_lora_rank=read.integer("kv_lora_rank"),
        q_lora_rank=read.optional_integer("q_lora_rank"),
        qk_nope_head_dim=read.integer("qk_nope_head_dim", at_most=MAX_HEAD_DIM),
        qk_rope_head_dim=rope_dim,
        v_head_dim=read.integer("v_head_dim", at_most=MAX_HEAD_DIM),
        rope=read_rope(read, rope_dim),
        rope_interleave=read.boolean("rope_interleave", True),
        num_nextn_predict_layers=read.integer("num_nextn_predict_layers", 0, at_least=0, at_most=MAX_LAYERS),
        weight_block_size=read_block_size(read),
        **_moe_fields(read, architecture),
    )
    if num_layers * config.n_routed_experts > MAX_LAYER_EXPERTS:
        limit = f"with {num_layers} layers it must be at most {MAX_LAYER_EXPERTS // num_layers:,}"
        read.refuse("n_routed_experts", limit)
    return config


def _moe_fields(read: FieldReader, architecture: str) -> dict[str, Any]:
    """The mixture-of-experts half of ModelConfig."""
    experts = read.integer("n_routed_experts", 0, at_least=0, at_most=MAX_EXPERTS)
    values: dict[str, Any] = {
        "n_routed_experts": experts,
        "n_shared_experts": read.integer("n_shared_experts", 0, at_least=0, at_most=MAX_EXPERTS),
        "first_k_dense_replace": read.integer("first_k_dense_replace", 0, at_least=0),
        "moe_layer_freq": read.integer("moe_layer_freq", 1),
        "num_experts_per_tok": 0,
        "moe_intermediate_size": 0,
        "topk_method": next(iter(ROUTINGS[architecture])),
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    }
    if not experts:
        return values
    methods = ROUTINGS[architecture]
    method = read.choice("topk_method", tuple(methods), next(iter(methods)))
    if "topk_method" not in read.bad and read.value("scoring_func", methods[method]) != methods[method]:
        read.refuse("scoring_func", f"topk_method {method!r} goes with {methods[method]!r}")
    # Published DeepSeek-V3 configs state these; its code has other defaults than DeepSeek-V2's, so none is assumed.
    stated = architecture == V3
    groups = 1 if method == "greedy" else read.integer("n_group", None if stated else 1)
    kept = 1 if method == "greedy" else read.integer("topk_group", None if stated else 1)
    per_token = read.integer("num_experts_per_tok")
    if not read.bad & {"n_group", "topk_group", "num_experts_per_tok", "n_routed_experts"}:
        _check_groups(read, method, experts, groups, kept, per_token)
    return values | {
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": read.integer("moe_intermediate_size"),
        "topk_method": method,
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": read.boolean("norm_topk_prob", None if stated else False),
        "routed_scaling_factor": read.number("routed_scaling_factor", None if stated else 1.0),
    }


def _check_groups(read: FieldReader, method: str, experts: int, groups: int, kept: int, per_token: int) -> None:
    if experts % groups:
        read.refuse("n_group", f"it must divide n_routed_experts, {experts}", groups)
    elif method == "noaux_tc" and experts // groups < 2:
        read.refuse("n_group", "noaux_tc needs at least 2 experts a group", groups)
    elif kept > groups:
        read.refuse("topk_group", f"it must not exceed n_group, {groups}", kept)
    elif per_token > experts // groups * kept:
        read.refuse("num_experts_per_tok", f"at most {experts // groups * kept} can be chosen")


def expected_shapes(config: ModelConfig, stored: Collection[str] = ()) -> dict[str, Shape]:
    """Return the shape of every tensor that a checkpoint of this config holds, by published name.

    Matrices are [out, in]. Experts lie one by one (`experts.3.gate_proj.weight`), as they are published, or stacked
    (`experts.gate_up_proj` [E, 2I, hidden] and `experts.down_proj` [E, hidden, I]), as transformers 5 keeps them.

    Args:
        stored: names in the checkpoint, which decide the form; without them it is the published one.
    """
    hidden, heads = config.hidden_size, config.num_heads
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)

    def mlp(prefix: str, inner: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = shapes[f"{prefix}.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, inner)

    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        attention = at + "self_attn."
        query = (heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank or hidden)
        if config.q_lora_rank is None:
            shapes[attention + "q_proj.weight"] = query
        else:
            shapes[attention + "q_a_proj.weight"] = (config.q_lora_rank, hidden)
            shapes[attention + "q_a_layernorm.weight"] = (config.q_lora_rank,)
            shapes[attention + "q_b_proj.weight"] = query
        shapes[attention + "kv_a_proj_with_mqa.weight"] = (config.row_size, hidden)
        shapes[attention + "kv_a_layernorm.weight"] = (config.kv_lora_rank,)
        expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
        shapes[attention + "kv_b_proj.weight"] = (expanded, config.kv_lora_rank)
        shapes[attention + "o_proj.weight"] = (hidden, heads * config.v_head_dim)
        if not config.is_moe_layer(layer):
            mlp(at + "mlp", config.intermediate_size)
            continue
        experts, inner = config.n_routed_experts, config.moe_intermediate_size
        shapes[at + "mlp.gate.weight"] = (experts, hidden)
        if config.topk_method == "noaux_tc":
            shapes[at + "mlp.gate.e_score_correction_bias"] = (experts,)
        if _is_stacked(at + "mlp.experts", stored):
            shapes[at + "mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
            shapes[at + "mlp.experts.down_proj"] = (experts, hidden, inner)
        else:
            for expert in range(experts):
                mlp(f"{at}mlp.experts.{expert}", inner)
        if config.n_shared_experts:
            mlp(at + "mlp.shared_experts", inner * config.n_shared_experts)
    return shapes


def memory_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of the model's tensors in memory with `itemsize` bytes an element; the router's stay float32."""
    # Every element has one place in memory however it is stored, and the stacked form has the fewest names.
    stacked = {f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(config.num_layers)}
    shapes = expected_shapes(config, stacked)
    return sum(prod(shape) * (4 if ".mlp.gate." in name else itemsize) for name, shape in shapes.items())


def is_unused(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is left out: prediction layers, a tied head, or the frequencies that old checkpoints carry."""
    layers = range(config.num_layers, config.num_layers + config.num_nextn_predict_layers)
    prediction = any(name.startswith(f"model.layers.{layer}.") for layer in layers)
    tied = name == "lm_head.weight" and config.tie_word_embeddings
    return prediction or tied or name.endswith(".rotary_emb.inv_freq")


def sanitize(config: ModelConfig, stored: Collection[str] = ()) -> dict[str, Weight]:
    """Return the model's tensors by name, and what of a checkpoint in any published form fills each.

    The query's and the row's projections lie in one matrix, so do gate and up; kv_b is split for absorption; all
    experts of a layer are stacked; rotary rows are half-split. Matrices are [out, in]. `stored` as in
    :func:`expected_shapes`.
    """
    hidden = config.hidden_size
    weights: dict[str, Weight] = {}

    def whole(name: str, shape: Shape, published: str, float32: bool = False) -> None:
        weights[name] = Weight(shape, (Source(published, Tensor.copy_),), float32)

    def gated(name: str, published: str, inner: int) -> None:
        halves = [(f"{published}.gate_proj.weight", 0), (f"{published}.up_proj.weight", inner)]
        sources = tuple(Source(half, partial(copy_rows, start)) for half, start in halves)
        weights[f"{name}.gate_up"] = Weight((2 * inner, hidden), sources)
        whole(f"{name}.down", (hidden, inner), f"{published}.down_proj.weight")

    whole("embedding", (config.vocab_size, hidden), "model.embed_tokens.weight")
    whole("norm", (hidden,), "model.norm.weight")
    if not config.tie_word_embeddings:
        whole("head", (config.vocab_size, hidden), "lm_head.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        whole(f"{ours}.input_norm", (hidden,), f"{theirs}.input_layernorm.weight")
        whole(f"{ours}.post_norm", (hidden,), f"{theirs}.post_attention_layernorm.weight")
        weights |= _attention(config, f"{ours}.attention", f"{theirs}.self_attn")
        if not config.is_moe_layer(layer):
            gated(f"{ours}.feed_forward", f"{theirs}.mlp", config.intermediate_size)
            continue
        count, inner = config.n_routed_experts, config.moe_intermediate_size
        whole(f"{ours}.feed_forward.router", (count, hidden), f"{theirs}.mlp.gate.weight", float32=True)
        if config.topk_method == "noaux_tc":
            bias = f"{theirs}.mlp.gate.e_score_correction_bias"
            whole(f"{ours}.feed_forward.router_bias", (count,), bias, float32=True)
        gate_up, down = _experts(f"{theirs}.mlp.experts", count, inner, stored)
        weights[f"{ours}.feed_forward.experts.gate_up"] = Weight((count, 2 * inner, hidden), gate_up)
        weights[f"{ours}.feed_forward.experts.down"] = Weight((count, hidden, inner), down)
        if config.n_shared_experts:
            gated(f"{ours}.feed_forward.shared", f"{theirs}.mlp.shared_experts", inner * config.n_shared_experts)
    return weights


def _attention(config: ModelConfig, ours: str, theirs: str) -> dict[str, Weight]:
    """Return one layer's attention tensors, named from `ours` on, and their sources, published from `theirs` on."""
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    dn, dr, dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    weights: dict[str, Weight] = {}
    rotary_query = partial(copy_rotary, 0, heads * (dn + dr), heads, dr, config.rope_interleave)
    if config.q_lora_rank is None:
        first = heads * (dn + dr)
        query = Source(f"{theirs}.q_proj.weight", rotary_query)
    else:
        first = config.q_lora_rank
        query = Source(f"{theirs}.q_a_proj.weight", partial(copy_rows, 0))
        q_norm, q_b = f"{theirs}.q_a_layernorm.weight", f"{theirs}.q_b_proj.weight"
        weights[f"{ours}.q_norm"] = Weight((first,), (Source(q_norm, Tensor.copy_),))
        weights[f"{ours}.q_b"] = Weight((heads * (dn + dr), first), (Source(q_b, rotary_query),))
    # The query's first projection and the row's share their input: one product [query, R, dr].
    rotary_row = partial(copy_rotary, first, first + config.row_size, 1, dr, config.rope_interleave)
    row = Source(f"{theirs}.kv_a_proj_with_mqa.weight", rotary_row)
    weights[f"{ours}.down"] = Weight((first + config.row_size, hidden), (query, row))
    weights[f"{ours}.kv_norm"] = Weight((rank,), (Source(f"{theirs}.kv_a_layernorm.weight", Tensor.copy_),))
    kv_b = f"{theirs}.kv_b_proj.weight"
    weights[f"{ours}.w_uk"] = Weight((heads, dn, rank), (Source(kv_b, copy_key_half),))
    weights[f"{ours}.w_uv"] = Weight((heads, rank, dv), (Source(kv_b, copy_value_half),))
    weights[f"{ours}.o"] = Weight((hidden, heads * dv), (Source(f"{theirs}.o_proj.weight", Tensor.copy_),))
    return weights


def _is_stacked(prefix: str, stored: Collection[str]) -> bool:
    return f"{prefix}.gate_up_proj" in stored


def _experts(
    prefix: str, count: int, inner: int, stored: Collection[str]
) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    gate_up, down = [], []
    stacked = _is_stacked(prefix, stored)
    for e in range(count):
        into = partial(copy_expert, e, 0)
        if stacked:
            gate_up.append(Source(f"{prefix}.gate_up_proj", into, expert=e))
            down.append(Source(f"{prefix}.down_proj", into, expert=e))
        else:
            gate_up.append(Source(f"{prefix}.{e}.gate_proj.weight", into))
            gate_up.append(Source(f"{prefix}.{e}.up_proj.weight", partial(copy_expert, e, inner)))
            down.append(Source(f"{prefix}.{e}.down_proj.weight", into))
    return tuple(gate_up), tuple(down)
