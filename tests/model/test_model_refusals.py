"""A model folder that is not understood is refused at start-up, with field and value, or file, or tensor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_checkpoint import CONFIG, write_model

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.model import load_config, load_model, parse_config

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


class TestConfig:
    @pytest.mark.parametrize(
        ("field", "value", "named"),
        [
            ("architectures", ["LlamaForCausalLM"], "architectures is ['LlamaForCausalLM']"),
            ("architectures", ["DeepseekV32ForCausalLM"], "architectures is ['DeepseekV32ForCausalLM']"),
            ("hidden_act", "gelu", "hidden_act is 'gelu'"),
            ("attention_bias", True, "attention_bias is True"),
            ("mlp_bias", True, "mlp_bias is True"),
            ("num_key_value_heads", 1, "num_key_value_heads is 1"),
            ("topk_method", "random", "topk_method is 'random'"),
            ("scoring_func", "softmax", "scoring_func is 'softmax'"),
            ("n_group", 3, "n_group is 3"),
            ("topk_group", 3, "topk_group is 3"),
            ("num_experts_per_tok", 3, "num_experts_per_tok is 3"),
            ("num_experts_per_tok", 0, "num_experts_per_tok is 0"),
            ("qk_rope_head_dim", 5, "qk_rope_head_dim is 5"),
            ("q_lora_rank", 0, "q_lora_rank is 0"),
            ("kv_lora_rank", None, "kv_lora_rank is None"),
            ("hidden_size", "16", "hidden_size is '16'"),
            ("vocab_size", True, "vocab_size is True"),
            ("max_position_embeddings", -1, "max_position_embeddings is -1"),
            ("rms_norm_eps", 0, "rms_norm_eps is 0"),
            ("tie_word_embeddings", "no", "tie_word_embeddings is 'no'"),
            ("moe_layer_freq", 0, "moe_layer_freq is 0"),
            ("routed_scaling_factor", "2", "routed_scaling_factor is '2'"),
            ("quantization_config", {"quant_method": "gptq"}, "quantization_config.quant_method is 'gptq'"),
            ("quantization_config", {"quant_method": "fp8"}, "quantization_config.weight_block_size is missing"),
            ("rope_scaling", {"type": "linear", "factor": 2.0}, "rope_scaling.type is 'linear'"),
            ("rope_scaling", {**YARN, "factor": "4"}, "rope_scaling.factor is '4'"),
            ("rope_scaling", {**YARN, "factor": 0}, "rope_scaling.factor is 0"),
            ("rope_scaling", {**YARN, "mscale": -1}, "rope_scaling.mscale is -1"),
            ("rope_scaling", {**YARN, "long_factor": [1.0]}, "rope_scaling.long_factor is [1.0]"),
            ("rope_scaling", {"type": "yarn", "factor": 4.0}, "original_max_position_embeddings is missing"),
            ("rope_scaling", "yarn", "rope_scaling is 'yarn'"),
            ("rope_parameters", {"rope_type": "llama3", "factor": 8.0}, "rope_parameters.type is 'llama3'"),
            ("rope_parameters", {"rope_type": "default", "rope_theta": 0}, "rope_parameters.rope_theta is 0"),
            ("rope_theta", -1.0, "json: rope_theta is -1.0"),
            ("rope_scaling", {"factor": 40}, "rope_scaling.factor is 40"),
            ("rope_scaling", {**YARN, "rope_type": "linear"}, "rope_scaling.type is 'linear'"),
            ("rope_scaling", {**YARN, "type": "dynamic"}, "rope_scaling.type is 'dynamic'"),
            ("rope_scaling", {**YARN, "type": "longrope"}, "rope_scaling.type is 'longrope'"),
            ("rope_scaling", {**YARN, "truncate": "yes"}, "rope_scaling.truncate is 'yes'"),
            ("rope_parameters", {**YARN, "rope_theta": 5e5}, "json: rope_theta is 10000.0"),
            ("rope_parameters", {"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
            ("topk_method", "greedy", "topk_method is 'greedy'"),
            ("norm_topk_prob", None, "norm_topk_prob is None"),
            ("routed_scaling_factor", None, "routed_scaling_factor is None"),
            ("index_topk", 2048, "index_topk is 2048"),
            ("sliding_window", 4096, "sliding_window is 4096"),
            ("attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50.0"),
            ("quantization_config", {"quant_method": "compressed-tensors"}, "quant_method is 'compressed-tensors'"),
            ("quantization_config", "fp8", "quantization_config is 'fp8'"),
        ],
    )
    def test_field_and_value_are_named(self, field: str, value: Any, named: str) -> None:
        with pytest.raises(UnsupportedModelError) as caught:
            parse_config({**CONFIG, field: value})
        assert named in str(caught.value)

    def test_every_problem_is_named_at_once(self) -> None:
        changes = {"hidden_act": "gelu", "vocab_size": 0, "index_topk": 1, "rope_scaling": {**YARN, "factor": -1}}
        with pytest.raises(UnsupportedModelError) as caught:
            parse_config({**CONFIG, **changes})
        for part in ("hidden_act is 'gelu'", "vocab_size is 0", "index_topk is 1", "rope_scaling.factor is -1"):
            assert part in str(caught.value)

    def test_two_spellings_of_rope_must_agree(self) -> None:
        rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
        parse_config({**CONFIG, "rope_scaling": rope, "rope_parameters": rope})
        with pytest.raises(UnsupportedModelError, match=r"rope_scaling is .*keep one"):
            parse_config({**CONFIG, "rope_scaling": YARN, "rope_parameters": {**rope, "factor": 8.0}})

    def test_unknown_fields_are_named_in_the_log(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        write_model(tmp_path, {**CONFIG, "made_up": [1], "aux_loss_alpha": 0.1, "sliding_window": None})
        load_config(tmp_path)
        assert [record.getMessage() for record in caplog.records] == ["config.json: not used: made_up = [1]"]

    def test_noaux_tc_ranks_groups_by_two_experts(self) -> None:
        with pytest.raises(UnsupportedModelError, match="n_group is 4"):
            parse_config({**CONFIG, "n_group": 4, "topk_group": 4})

    def test_model_type_decides_where_architectures_is_missing(self) -> None:
        raw = {**CONFIG, "architectures": None}
        assert parse_config({**raw, "model_type": "kimi_k2"}).architecture == "DeepseekV3ForCausalLM"
        with pytest.raises(UnsupportedModelError, match="model_type is 'llama'"):
            parse_config({**raw, "model_type": "llama"})

    @pytest.mark.parametrize("missing", ["hidden_size", "num_hidden_layers", "num_experts_per_tok", "v_head_dim"])
    def test_missing_field(self, missing: str) -> None:
        with pytest.raises(UnsupportedModelError, match=f"{missing} is missing"):
            parse_config({name: value for name, value in CONFIG.items() if name != missing})

    def test_dense_model_needs_no_expert_fields(self) -> None:
        raw = {name: value for name, value in CONFIG.items() if "expert" not in name and "topk" not in name}
        config = parse_config(raw)
        assert not any(config.is_moe_layer(layer) for layer in range(config.num_layers))

    def test_moe_layer_freq(self) -> None:
        config = parse_config({**CONFIG, "num_hidden_layers": 6, "moe_layer_freq": 2})
        assert [config.is_moe_layer(layer) for layer in range(6)] == [False, False, True, False, True, False]


class TestFolder:
    def test_a_whole_folder_loads(self, tmp_path: Path) -> None:
        """Weights of the extra prediction layer and stored frequencies are left alone."""
        extra = {
            "model.layers.2.eh_proj.weight": torch.ones(2),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        }
        write_model(tmp_path, **extra)
        assert load_model(tmp_path).logits([1, 2, 3]).isfinite().all()

    def test_missing_folder_and_files(self, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModelError, match="nowhere"):
            load_model(tmp_path / "nowhere")
        with pytest.raises(UnsupportedModelError, match=r"config\.json"):
            load_model(tmp_path)
        write_model(tmp_path)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(UnsupportedModelError, match=r"lacks model\.safetensors"):
            load_model(tmp_path)
        index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        with pytest.raises(UnsupportedModelError, match=r"lacks model-00001-of-00002\.safetensors"):
            load_model(tmp_path)

    @pytest.mark.parametrize("text", ["{", "[1]", "\x00"])
    def test_config_that_is_no_object(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(UnsupportedModelError, match=r"config\.json"):
            load_model(tmp_path)

    @pytest.mark.parametrize("keep", [0, 5, 200])
    def test_truncated_weights(self, tmp_path: Path, keep: int) -> None:
        write_model(tmp_path)
        path = tmp_path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(UnsupportedModelError, match="not a readable safetensors file"):
            load_model(tmp_path)

    def test_index_that_is_none(self, tmp_path: Path) -> None:
        write_model(tmp_path)
        (tmp_path / "model.safetensors.index.json").write_text('{"metadata": {}}')
        with pytest.raises(UnsupportedModelError, match="not a safetensors index"):
            load_model(tmp_path)

    def test_all_wrong_tensors_are_named_at_once(self, tmp_path: Path) -> None:
        write_model(
            tmp_path,
            **{
                "model.norm.weight": None,
                "model.layers.1.mlp.gate.e_score_correction_bias": None,
                "model.layers.0.self_attn.kv_b_proj.weight": torch.zeros(16, 7),
                "model.layers.0.self_attn.q_proj.bias": torch.zeros(3),
                "model.layers.5.mlp.gate.weight": torch.zeros(3),
            },
        )
        with pytest.raises(UnsupportedModelError) as caught:
            load_model(tmp_path)
        message = str(caught.value)
        assert "5 problems" in message
        for part in (
            "missing model.norm.weight [16]",
            "missing model.layers.1.mlp.gate.e_score_correction_bias [4]",
            "model.layers.0.self_attn.kv_b_proj.weight is [16, 7], must be [16, 8]",
            "unexpected model.layers.0.self_attn.q_proj.bias [3]",
            "unexpected model.layers.5.mlp.gate.weight [3]",
        ):
            assert part in message

    def test_many_problems_stay_readable(self, tmp_path: Path) -> None:
        write_model(tmp_path)
        raw = {**CONFIG, "n_routed_experts": 64}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        with pytest.raises(UnsupportedModelError, match="more") as caught:
            load_model(tmp_path)
        assert len(str(caught.value)) < 1500

    def test_dtypes_that_are_not_understood(self, tmp_path: Path) -> None:
        packed = torch.zeros(16, 8, dtype=torch.int8)
        float8 = torch.zeros(16, 8, dtype=torch.float8_e4m3fn)
        write_model(tmp_path, **{"model.layers.0.self_attn.kv_b_proj.weight": packed})
        with pytest.raises(UnsupportedModelError, match=r"kv_b_proj\.weight is I8"):
            load_model(tmp_path)
        write_model(tmp_path, **{"model.layers.0.self_attn.kv_b_proj.weight": float8})
        with pytest.raises(UnsupportedModelError, match=r"kv_b_proj\.weight is F8_E4M3, but"):
            load_model(tmp_path)
        (tmp_path / "config.json").write_text(
            json.dumps({**CONFIG, "quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 4]}})
        )
        with pytest.raises(UnsupportedModelError, match=r"missing .*kv_b_proj\.weight_scale_inv \[2, 2\]"):
            load_model(tmp_path)

    def test_scales_without_quantization_config(self, tmp_path: Path) -> None:
        write_model(tmp_path, **{"model.layers.0.self_attn.kv_b_proj.weight_scale_inv": torch.ones(1, 1)})
        with pytest.raises(UnsupportedModelError, match=r"unexpected .*weight_scale_inv"):
            load_model(tmp_path)
