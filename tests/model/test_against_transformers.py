"""Logits of tiny random models against transformers' DeepseekV2ForCausalLM and DeepseekV3ForCausalLM, in float32."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.model import deepseek, load_model
from irminsul_backend.model.float8 import scale_blocks
from irminsul_backend.model.layout import copy_rotary
from irminsul_backend.model.moe import MoE

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
SIZES = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 10,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
YARN = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1}
V2_GROUPS = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.0}
V3 = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 0}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("V2", {}),
    "v2-q_lora": ("V2", {"q_lora_rank": 20}),
    "v2-groups": ("V2", V2_GROUPS),
    "v2-all-dense": ("V2", {"first_k_dense_replace": 3}),
    "v2-all-moe-tied": ("V2", {"first_k_dense_replace": 0, "tie_word_embeddings": True}),
    "v2-yarn": ("V2", {"rope_parameters": {**YARN, "rope_theta": 10000.0}}),
    "v2-yarn-mscale": (
        "V2",
        {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "v2-yarn-two-mscales": (
        "V2",
        {"rope_parameters": {**YARN, "rope_theta": 5e4, "mscale": 1.3, "mscale_all_dim": 0.5}},
    ),
    "v3": ("V3", V3),
    "v3-q_lora": ("V3", {**V3, "q_lora_rank": 20}),
    "v3-one-group": ("V3", {**V3, "n_group": 1, "topk_group": 1}),
    "v3-unnormalised": ("V3", {**V3, "norm_topk_prob": False}),
    "v3-half-split": ("V3", {**V3, "rope_interleave": False}),
    "v3-yarn-mscale": (
        "V3",
        {**V3, "rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0, "mscale_all_dim": 1.0}, "q_lora_rank": 20},
    ),
}


def save_reference(folder: Path, family: str, changes: dict[str, Any], seed: int = 0, **save: Any) -> Any:
    """A random transformers model, saved to `folder`; routers' correction biases and norms are random too."""
    torch.manual_seed(seed)
    config = getattr(transformers, f"Deepseek{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"Deepseek{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(0, 0.2)
            elif name.endswith("norm.weight"):
                tensor.uniform_(0.5, 1.5)
    model.save_pretrained(folder, **save)
    return model


def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0]


def random_ids(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (count,), generator=torch.Generator().manual_seed(seed))


class TestLogits:
    @pytest.mark.parametrize("variant", VARIANTS)
    def test_equal_transformers(self, variant: str, tmp_path: Path) -> None:
        """Every switch of the architecture, from 1 token to 300."""
        reference = save_reference(tmp_path, *VARIANTS[variant])
        ours = load_model(tmp_path)
        for count in (1, 2, 33, 300):
            ids = random_ids(count, seed=count)
            expected, got = reference_logits(reference, ids), ours.logits(ids)
            assert got.dtype == torch.float32 and got.shape == (count, SIZES["vocab_size"])
            assert expected.std() > 0.3, "the reference is degenerate; the comparison would prove nothing"
            assert (got - expected).abs().max() <= TOLERANCE

    def test_older_rope_spelling_is_the_same(self, tmp_path: Path) -> None:
        """`rope_theta` + `rope_scaling` of published checkpoints mean what `rope_parameters` means."""
        reference = save_reference(tmp_path, *VARIANTS["v2-yarn-mscale"])
        path = tmp_path / "config.json"
        raw = json.loads(path.read_text())
        scaling = raw.pop("rope_parameters")
        scaling["type"] = scaling.pop("rope_type")
        path.write_text(json.dumps({**raw, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}))
        ids = random_ids(200)
        assert (load_model(tmp_path).logits(ids) - reference_logits(reference, ids)).abs().max() <= TOLERANCE

    def test_sharded_checkpoint(self, tmp_path: Path) -> None:
        reference = save_reference(tmp_path, *VARIANTS["v3-q_lora"], max_shard_size="100KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
        ids = random_ids(20)
        assert (load_model(tmp_path).logits(ids) - reference_logits(reference, ids)).abs().max() <= TOLERANCE

    def test_bfloat16_stays_close(self, tmp_path: Path) -> None:
        """bfloat16 weights and activations: the same model, coarser."""
        reference = save_reference(tmp_path, *VARIANTS["v2-yarn-mscale"])
        ids = random_ids(60)
        expected, got = reference_logits(reference, ids), load_model(tmp_path, dtype=torch.bfloat16).logits(ids)
        assert got.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(got, expected, dim=-1).mean() > 0.99

    @pytest.mark.parametrize("variant", ["v2", "v3"])
    def test_wrong_rope_layout_is_noticed(self, variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without the permutation at load the logits are far off: the comparison above does see the layout."""
        reference = save_reference(tmp_path, *VARIANTS[variant])
        ids = random_ids(64)
        expected = reference_logits(reference, ids)
        monkeypatch.setattr(
            deepseek,
            "copy_rotary",
            lambda start, end, heads, dim, interleaved, ours, theirs: copy_rotary(
                start, end, heads, dim, False, ours, theirs
            ),
        )
        wrong = (load_model(tmp_path).logits(ids) - expected).abs().max()
        assert wrong > 100 * TOLERANCE

    def test_ids_are_checked(self, tmp_path: Path) -> None:
        save_reference(tmp_path, *VARIANTS["v2"])
        model = load_model(tmp_path)
        for ids, words in (([], "shape"), ([0] * 513, "512"), ([101], "101"), ([-1, 3], "-1")):
            with pytest.raises(InvalidRequestError, match=words):
                model.logits(ids)


class TestPublishedSemantics:
    """Where transformers departs from the published DeepSeek code, we follow the latter."""

    def test_softmax_weights_are_normalised_or_scaled_never_both(self, tmp_path: Path) -> None:
        """norm_topk_prob with softmax scores: weights add up to 1 and routed_scaling_factor is not applied."""
        save_reference(tmp_path, "V2", {"norm_topk_prob": True, "routed_scaling_factor": 7.0})
        block = load_model(tmp_path).layers[1].feed_forward
        assert isinstance(block, MoE)
        experts, weights = block.router(torch.randn(50, SIZES["hidden_size"]))
        assert torch.allclose(weights.sum(-1), torch.ones(50))
        assert all(len(set(row)) == SIZES["num_experts_per_tok"] for row in experts.tolist())

    def test_attention_factor_with_only_one_mscale(self, tmp_path: Path) -> None:
        one, two = 0.1 * math.log(8) + 1, 0.2 * math.log(8) + 1
        for field, attention, softmax in (("mscale", two, 1.0), ("mscale_all_dim", one / two, two**2)):
            save_reference(tmp_path / field, "V2", {"rope_parameters": {**YARN, "rope_theta": 1e4, field: 2.0}})
            rope = load_model(tmp_path / field).config.rope
            assert rope.attention_factor == pytest.approx(attention)
            assert rope.softmax_factor == pytest.approx(softmax)


class TestFloat8Blocks:
    def test_block_scaled_weights_equal_their_plain_values(self, tmp_path: Path) -> None:
        """float8 weights with a scale per 16 x 16 block load as weight * scale; ragged edges included."""
        from safetensors.torch import load_file, save_file

        plain, packed = tmp_path / "plain", tmp_path / "packed"
        save_reference(plain, *VARIANTS["v3-q_lora"])
        packed.mkdir()
        tensors, quantised = load_file(plain / "model.safetensors"), {}
        for name, weight in tensors.items():
            quantised[name] = weight
            if name.endswith(("_proj.weight", "kv_a_proj_with_mqa.weight")):
                blocks = [-(-size // 16) for size in weight.shape]
                scale = torch.rand(blocks) * 0.01 + 0.001
                full = scale_blocks(torch.ones_like(weight), scale, (16, 16))
                small = (weight / full).to(torch.float8_e4m3fn)
                quantised[name], quantised[name + "_scale_inv"] = small, scale
                tensors[name] = small.float() * full
        save_file(tensors, plain / "model.safetensors")
        save_file(quantised, packed / "model.safetensors")
        raw = json.loads((plain / "config.json").read_text())
        raw["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
        (packed / "config.json").write_text(json.dumps(raw))
        ids = random_ids(40)
        assert torch.equal(load_model(packed).logits(ids), load_model(plain).logits(ids))
