"""ModelConfig: what config.json says about an MLA model, checked; every value that is not understood is refused."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.config_fields import MAX_SIZE, FieldReader
from irminsul_backend.hub.json_file import parse_json
from irminsul_backend.model.rope import Rope, read_rope

V2, V3 = "DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"
MODEL_TYPES = {"deepseek_v2": V2, "deepseek_v3": V3, "kimi_k2": V3, "joyai_llm_flash": V3}
"""The architecture that a model_type means where `architectures` is missing."""
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
UNUSED = frozenset({
    "_name_or_path", "attention_dropout", "auto_map", "aux_loss_alpha", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "ep_size", "head_dim", "id2label", "initializer_range", "is_encoder_decoder", "label2id",
    "max_window_layers", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "qk_head_dim", "return_dict", "router_aux_loss_coef", "seq_aux", "torch_dtype",
    "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip
"""Fields of published configs that say nothing about inference, or repeat others."""

MAX_LAYERS, MAX_EXPERTS, MAX_HEAD_DIM, MAX_POSITIONS = 1_000, 10_000, 100_000, 1_000_000_000
MAX_LAYER_EXPERTS = 200_000
"""Layers times experts, each of which is three tensors by name; the largest published models have 23,424.

All these limits lie far above published models: they turn a damaged file into a message instead of a long wait.
"""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ModelConfig:
    """Sizes and switches of one model. Names follow config.json, but for num_layers and num_heads."""

    architecture: str
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
    """Extra prediction layers behind the model's own; their weights are not used."""
    weight_block_size: tuple[int, int] | None
    """Block shape of float8 weights with one float32 scale a block; None = plain weights."""

    @property
    def row_size(self) -> int:
        """Elements of one cached row: c_KV, then k_r."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """Factor of q·k in front of the softmax; YaRN's mscale² is in it."""
        return (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5 * self.rope.softmax_factor

    def is_moe_layer(self, layer: int) -> bool:
        moe = self.n_routed_experts > 0
        return moe and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    @classmethod
    def load(cls, folder: str | Path) -> ModelConfig:
        """Read `folder`/config.json; raises UnsupportedModelError naming the file, or every bad field with its value.

        Fields that are neither understood nor known to be without meaning are named in the log.
        """
        raw = read_config(folder)
        config = cls.from_dict(raw)
        if unused := unused_fields(raw):
            logger.warning(
                "config.json: not used: %s", ", ".join(f"{name} = {value!r}" for name, value in unused.items())
            )
        return config

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Build from a parsed config.json; raises UnsupportedModelError naming every field that is not understood."""
        config, problems = cls.parse(raw)
        if problems:
            raise UnsupportedModelError(f"config.json: {'; also '.join(problems)}")
        return config

    @classmethod
    def parse(cls, raw: Mapping[str, Any]) -> tuple[ModelConfig, list[str]]:
        """The config and all its problems, each with field and value; with any problem the config means nothing."""
        read = FieldReader(raw)
        architecture = _architecture(read)
        for name in RELATED:
            if raw.get(name):
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
        config = cls(
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
            q_lora_rank=None if raw.get("q_lora_rank") is None else read.integer("q_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim", at_most=MAX_HEAD_DIM),
            qk_rope_head_dim=rope_dim,
            v_head_dim=read.integer("v_head_dim", at_most=MAX_HEAD_DIM),
            rope=read_rope(read, rope_dim),
            rope_interleave=read.boolean("rope_interleave", True),
            num_nextn_predict_layers=read.integer("num_nextn_predict_layers", 0, at_least=0, at_most=MAX_LAYERS),
            weight_block_size=_weight_block_size(read),
            **_moe_fields(read, architecture),
        )
        if num_layers * config.n_routed_experts > MAX_LAYER_EXPERTS:
            limit = f"with {num_layers} layers it must be at most {MAX_LAYER_EXPERTS // num_layers:,}"
            read.refuse("n_routed_experts", limit)
        return config, read.problems


def read_config(folder: str | Path) -> dict[str, Any]:
    """The parsed `folder`/config.json; raises UnsupportedModelError naming the file if it is not a JSON object."""
    path = Path(folder) / "config.json"
    try:
        raw = parse_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModelError(f"model folder {folder}: cannot read config.json ({error.strerror})") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise UnsupportedModelError(f"{path} holds {type(raw).__name__}; it must be a JSON object")
    return raw


def unused_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of config.json that are neither read nor known to say nothing about inference; null ones left out."""
    known = UNUSED | set(ModelConfig.__dataclass_fields__) | set(RELATED) | {
        "architectures", "attention_bias", "hidden_act", "mlp_bias", "model_type", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "quantization_config", "rope_parameters", "rope_scaling",
        "rope_theta", "scoring_func",
    }  # fmt: skip
    return {name: value for name, value in raw.items() if name not in known and value is not None}


def _architecture(read: FieldReader) -> str:
    names = read.value("architectures", [])
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in ROUTINGS:
            return name
    kind = read.value("model_type")
    if names:
        read.refuse("architectures", f"understood: {', '.join(ROUTINGS)}")
    elif not isinstance(kind, str) or kind not in MODEL_TYPES:
        read.refuse("model_type", f"understood: {', '.join(MODEL_TYPES)}")
    return MODEL_TYPES.get(str(kind), V3)


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


def _weight_block_size(read: FieldReader) -> tuple[int, int] | None:
    quantization = read.value("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        read.refuse("quantization_config", "it must be an object or null")
        return None
    inner = FieldReader(quantization, "quantization_config.", read.problems)
    inner.choice("quant_method", ("fp8",))
    block = quantization.get("weight_block_size")
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 0 < size <= MAX_SIZE for size in block)
    ):
        return block[0], block[1]
    if not inner.bad:
        inner.refuse("weight_block_size", "it must be two sizes, such as [128, 128]")
    return None
