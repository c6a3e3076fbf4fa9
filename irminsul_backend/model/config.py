"""ModelConfig: what config.json says about an MLA model, checked; every value that is not understood is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.model.rope import Rope, rope_from_config

ARCHITECTURES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
MODEL_TYPES = {"deepseek_v2": ARCHITECTURES[0], "deepseek_v3": ARCHITECTURES[1], "kimi_k2": ARCHITECTURES[1]}
ROUTINGS = {"greedy": "softmax", "group_limited_greedy": "softmax", "noaux_tc": "sigmoid"}


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
        """Read `folder`/config.json; raises UnsupportedModelError naming the file, or the field and its value."""
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UnsupportedModelError(f"model folder {folder}: cannot read config.json ({error.strerror})") from error
        except ValueError as error:
            raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise UnsupportedModelError(f"{path} holds {type(raw).__name__}; it must be a JSON object")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Build from a parsed config.json; raises UnsupportedModelError naming field and value."""
        read = _Reader(raw)
        architecture = _architecture(raw)
        read.refuse_unless("hidden_act", ("silu",), "silu")
        read.refuse_unless("attention_bias", (False, None), False)
        read.refuse_unless("mlp_bias", (False, None), False)
        num_heads = read.integer("num_attention_heads")
        read.refuse_unless("num_key_value_heads", (num_heads, None), num_heads)
        rope_dim = read.integer("qk_rope_head_dim")
        if rope_dim % 2:
            raise UnsupportedModelError(f"config.json: qk_rope_head_dim is {rope_dim}; it must be even")
        q_lora_rank = raw.get("q_lora_rank")
        return cls(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=read.integer("hidden_size"),
            num_layers=read.integer("num_hidden_layers"),
            num_heads=num_heads,
            intermediate_size=read.integer("intermediate_size"),
            max_position_embeddings=read.integer("max_position_embeddings"),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            tie_word_embeddings=read.boolean("tie_word_embeddings", False),
            kv_lora_rank=read.integer("kv_lora_rank"),
            q_lora_rank=None if q_lora_rank is None else read.integer("q_lora_rank"),
            qk_nope_head_dim=read.integer("qk_nope_head_dim"),
            qk_rope_head_dim=rope_dim,
            v_head_dim=read.integer("v_head_dim"),
            rope=rope_from_config(raw, rope_dim),
            rope_interleave=read.boolean("rope_interleave", True),
            num_nextn_predict_layers=read.integer("num_nextn_predict_layers", 0, at_least=0),
            weight_block_size=_weight_block_size(raw),
            **_moe_fields(read, architecture),
        )


class _Reader:
    """Typed access to config.json's fields; a wrong or missing one raises UnsupportedModelError."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw

    def value(self, name: str, default: Any) -> Any:
        value = self.raw.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int | None = None, at_least: int = 1) -> int:
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise UnsupportedModelError(f"config.json: {name} is {value!r}; it must be an integer, at least {at_least}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0:
            raise UnsupportedModelError(f"config.json: {name} is {value!r}; it must be a number over 0")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.value(name, default)
        if not isinstance(value, bool):
            raise UnsupportedModelError(f"config.json: {name} is {value!r}; it must be true or false")
        return value

    def refuse_unless(self, name: str, understood: tuple[Any, ...], default: Any) -> None:
        value = self.raw.get(name, default)
        if value not in understood:
            raise UnsupportedModelError(f"config.json: {name} is {value!r}; only {understood[0]!r} is understood")


def _architecture(raw: Mapping[str, Any]) -> str:
    names = raw.get("architectures") or []
    for name in names:
        if name in ARCHITECTURES:
            return str(name)
    if names:
        raise UnsupportedModelError(f"config.json: architectures is {names!r}; understood: {', '.join(ARCHITECTURES)}")
    kind = raw.get("model_type")
    if kind not in MODEL_TYPES:
        raise UnsupportedModelError(f"config.json: model_type is {kind!r}; understood: {', '.join(MODEL_TYPES)}")
    return MODEL_TYPES[kind]


def _moe_fields(read: _Reader, architecture: str) -> dict[str, Any]:
    """The mixture-of-experts half of ModelConfig."""
    experts = read.integer("n_routed_experts", 0, at_least=0)
    moe = experts > 0
    method = read.value("topk_method", "greedy" if architecture == ARCHITECTURES[0] else "noaux_tc")
    if moe and method not in ROUTINGS:
        raise UnsupportedModelError(f"config.json: topk_method is {method!r}; understood: {', '.join(ROUTINGS)}")
    scoring = read.value("scoring_func", ROUTINGS.get(method))
    if moe and scoring != ROUTINGS[method]:
        raise UnsupportedModelError(
            f"config.json: scoring_func is {scoring!r}; topk_method {method!r} goes with {ROUTINGS[method]!r}"
        )
    groups = 1 if method == "greedy" else read.integer("n_group", 1)
    kept = 1 if method == "greedy" else read.integer("topk_group", 1)
    per_token = read.integer("num_experts_per_tok") if moe else 0
    if moe and (experts % groups or kept > groups):
        raise UnsupportedModelError(
            f"config.json: n_group is {groups} and topk_group is {kept}; n_group must divide n_routed_experts "
            f"({experts}) and topk_group must not exceed it"
        )
    if moe and per_token > experts // groups * kept:
        raise UnsupportedModelError(
            f"config.json: num_experts_per_tok is {per_token}; at most {experts // groups * kept} can be chosen"
        )
    if moe and method == "noaux_tc" and experts // groups < 2:
        raise UnsupportedModelError(f"config.json: n_group is {groups}; noaux_tc needs at least 2 experts a group")
    return {
        "n_routed_experts": experts,
        "n_shared_experts": read.integer("n_shared_experts", 0, at_least=0),
        "num_experts_per_tok": per_token,
        "moe_intermediate_size": read.integer("moe_intermediate_size") if moe else 0,
        "first_k_dense_replace": read.integer("first_k_dense_replace", 0, at_least=0),
        "moe_layer_freq": read.integer("moe_layer_freq", 1),
        "topk_method": method,
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": read.boolean("norm_topk_prob", False),
        "routed_scaling_factor": read.number("routed_scaling_factor", 1.0),
    }


def _weight_block_size(raw: Mapping[str, Any]) -> tuple[int, int] | None:
    quantization = raw.get("quantization_config")
    if quantization is None:
        return None
    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
    if method != "fp8":
        raise UnsupportedModelError(f"config.json: quantization_config.quant_method is {method!r}; understood: fp8")
    block = quantization.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise UnsupportedModelError(
            f"config.json: quantization_config.weight_block_size is {block!r}; it must be two sizes, such as [128, 128]"
        )
    return block[0], block[1]
