"""A checkpoint of a few kilobytes in DeepSeek-V3's form, for tests that load or refuse one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from irminsul_backend.model import parse_config
from irminsul_backend.model.deepseek import expected_shapes

CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "kv_lora_rank": 8,
    "q_lora_rank": 6,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "hidden_act": "silu",
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000.0,
    "rope_scaling": None,
}


def write_model(folder: Path, config: dict[str, Any] = CONFIG, **tensors: torch.Tensor | None) -> None:
    """A whole folder; `tensors` replace (or, if None, remove) those of the same name."""
    weights = {name: torch.randn(shape) * 0.2 for name, shape in expected_shapes(parse_config(config)).items()}
    weights |= {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file({n: w for n, w in weights.items() if tensors.get(n, w) is not None}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
