"""Small random checkpoints in exactly the form that each family is published in."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

CODE = {"AutoConfig": "configuration_deepseek.Config", "AutoModelForCausalLM": "modeling_deepseek.ForCausalLM"}
EVERY = {
    "attention_bias": False, "attention_dropout": 0.0, "auto_map": CODE, "hidden_act": "silu",
    "initializer_range": 0.02, "kv_lora_rank": 512, "moe_layer_freq": 1, "pretraining_tp": 1, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "v_head_dim": 128,
}  # fmt: skip
YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "original_max_position_embeddings": 4096, "type": "yarn"}
FLOAT8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
V2: dict[str, Any] = {
    **EVERY, "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "aux_loss_alpha": 0.001,
    "bos_token_id": 100000, "eos_token_id": 100001, "ep_size": 1, "first_k_dense_replace": 1, "hidden_size": 5120,
    "intermediate_size": 12288, "max_position_embeddings": 163840, "moe_intermediate_size": 1536, "n_group": 8,
    "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 128,
    "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "rms_norm_eps": 1e-06, "rope_scaling": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707}, "rope_theta": 10000,
    "routed_scaling_factor": 16.0, "scoring_func": "softmax", "seq_aux": True, "topk_group": 3,
    "topk_method": "group_limited_greedy", "transformers_version": "4.39.3", "vocab_size": 102400,
}  # fmt: skip
V3: dict[str, Any] = {
    **EVERY, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "bos_token_id": 0,
    "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432,
    "max_position_embeddings": 163840, "moe_intermediate_size": 2048, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "q_lora_rank": 1536,
    "quantization_config": FLOAT8, "rms_norm_eps": 1e-06,
    "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "rope_theta": 10000,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc",
    "transformers_version": "4.33.1", "vocab_size": 129280,
}  # fmt: skip
PLAIN_V3 = {name: value for name, value in V3.items() if name != "quantization_config"}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2": V2,
    "DeepSeek-V2-Lite": {
        **V2, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
    },
    "DeepSeek-V3": V3,
    "Moonlight-16B-A3B": {
        **PLAIN_V3, **ONE_GROUP, "aux_loss_alpha": 0.001, "bos_token_id": 163584, "eos_token_id": 163585,
        "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
        "moe_intermediate_size": 1408, "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16,
        "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0,
        "q_lora_rank": None, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 50000.0,
        "routed_scaling_factor": 2.446, "seq_aux": True, "vocab_size": 163840,
    },
    "Kimi-K2": {
        **V3, **ONE_GROUP, "model_type": "kimi_k2", "aux_loss_alpha": 0.001, "bos_token_id": 163584,
        "eos_token_id": 163585, "max_position_embeddings": 131072, "n_routed_experts": 384,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
        "rope_scaling": {**YARN, "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0,
                         "mscale_all_dim": 1.0},
        "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "seq_aux": True, "vocab_size": 163840,
    },
    "JoyAI-LLM-Flash": {
        **PLAIN_V3, **ONE_GROUP, "model_type": "joyai_llm_flash", "hidden_size": 2048, "intermediate_size": 7168,
        "max_position_embeddings": 131072, "moe_intermediate_size": 768, "num_attention_heads": 32,
        "num_hidden_layers": 40, "num_key_value_heads": 32, "rope_scaling": None, "rope_theta": 32000000.0,
    },
}  # fmt: skip
"""config.json of each family: published names and values. JoyAI's sizes are its model card's; its rope_theta is not
stated there and stands for any."""


def shrink(config: dict[str, Any]) -> dict[str, Any]:
    """The same switches and spellings with small sizes; matrices are larger than a float8 block, but no multiple."""
    experts = 4 * config["n_group"] if config["n_group"] > 1 else 16
    return {
        **config, "vocab_size": 150, "hidden_size": 192, "intermediate_size": 144, "moe_intermediate_size": 136,
        "num_hidden_layers": config["first_k_dense_replace"] + 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "kv_lora_rank": 40, "q_lora_rank": config["q_lora_rank"] and 144, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16, "v_head_dim": 10, "n_routed_experts": experts, "bos_token_id": 0, "eos_token_id": 1,
    }  # fmt: skip


def build_reference(config: dict[str, Any], seed: int = 0) -> Any:
    """A random transformers model of `config` in float32 with weights that bfloat16 holds exactly."""
    import transformers

    family = config["architectures"][0]
    ours = ("quantization_config", "auto_map", "initializer_range", "model_type")
    fields = {name: value for name, value in config.items() if name not in ours}
    settings = getattr(transformers, family.replace("ForCausalLM", "Config"))(**fields, initializer_range=0.06)
    torch.manual_seed(seed)
    model = getattr(transformers, family)(settings).float().eval()
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            if index >= settings.first_k_dense_replace and index % config["moe_layer_freq"]:
                layer.mlp = type(model.model.layers[0].mlp)(settings)  # the reference does not know moe_layer_freq
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.uniform_(0.0, 0.3)
            elif name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
            elif name.endswith("embed_tokens.weight"):
                tensor.normal_()  # as large as in trained models, or each layer would drown the ones before it
            elif name.endswith("mlp.gate.weight"):
                tensor.normal_(0, 0.2)
            if "rotary" not in name and "bias" not in name:
                tensor.copy_(tensor.bfloat16())
    return model


def to_float8(weight: torch.Tensor, block: tuple[int, int] = (128, 128)) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8 values, float32 scales of each block), as published: the largest value of a block becomes 448."""
    rows, columns = (-(-size // side) for size, side in zip(weight.shape, block, strict=True))
    values, scales = torch.empty(weight.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns)
    for i in range(rows):
        for j in range(columns):
            at = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            scales[i, j] = weight[at].abs().max() / 448
            values[at] = (weight[at] / scales[i, j]).to(torch.float8_e4m3fn)
    return values, scales


@pytest.fixture(scope="session")
def published() -> dict[str, dict[str, Any]]:
    return PUBLISHED


@pytest.fixture(scope="session")
def small() -> dict[str, dict[str, Any]]:
    """Each family's config with small sizes."""
    return {name: shrink(config) for name, config in PUBLISHED.items()}


@pytest.fixture
def write_checkpoint(tmp_path: Path) -> Callable[..., tuple[Path, Any]]:
    """(config, options of save_pretrained) -> (folder, the reference model that is in it)."""

    def write(config: dict[str, Any], **save: Any) -> tuple[Path, Any]:
        from safetensors.torch import load_file, save_file

        reference = build_reference(config)
        dtype = save.pop("dtype", torch.bfloat16)
        bias = {n: b for n, b in reference.state_dict().items() if n.endswith("e_score_correction_bias")}
        copy.deepcopy(reference).to(dtype).save_pretrained(tmp_path, **save)  # a copy: it rounds the frequencies too
        (tmp_path / "config.json").write_text(json.dumps(config))
        for path in sorted(tmp_path.glob("*.safetensors")):
            tensors = load_file(path)
            for name in [name for name in tensors if name in bias]:
                tensors[name] = bias[name]  # published in float32
            if config.get("quantization_config"):
                for name in [n for n in tensors if n.endswith(("proj.weight", "with_mqa.weight"))]:
                    tensors[name], tensors[name + "_scale_inv"] = to_float8(tensors[name].float())
            save_file(tensors, path)
        return tmp_path, reference

    return write
