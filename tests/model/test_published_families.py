"""Checkpoints in the published form of every family, loaded and compared with transformers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from irminsul_backend.engine.runner import ModelRunner, Piece
from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.model import load_model, parse_config
from irminsul_backend.model.deepseek import expected_shapes
from irminsul_backend.model.loading import unused_fields
from irminsul_backend.model.moe import Router

pytest.importorskip("transformers")

TOLERANCE = 1e-4
BFLOAT16_TOLERANCE = 2e-2
FAMILIES = ["DeepSeek-V2", "DeepSeek-V2-Lite", "DeepSeek-V3", "Moonlight-16B-A3B", "Kimi-K2", "JoyAI-LLM-Flash"]
Configs = dict[str, dict[str, Any]]
Write = Callable[..., tuple[Path, Any]]


def random_ids(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(0, 150, (count,), generator=torch.Generator().manual_seed(seed))


def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(ids[None]).logits[0].float()


def plain(config: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**{name: value for name, value in config.items() if name != "quantization_config"}, **changes}


@pytest.mark.parametrize("family", FAMILIES)
class TestEveryFamily:
    def test_logits_and_decoding(self, family: str, small: Configs, write_checkpoint: Write) -> None:
        folder, reference = write_checkpoint(plain(small[family]))
        model = load_model(folder)
        for count in (1, 2, 33, 300):
            ids = random_ids(count, seed=count)
            expected, got = reference_logits(reference, ids), model.logits(ids)
            assert expected.std() > 0.3, "the reference is degenerate; the comparison would prove nothing"
            assert (got - expected).abs().max() <= TOLERANCE
        decoded = decode(model, ids[:60].tolist())
        assert (decoded - expected[:60]).abs().max() <= TOLERANCE

    def test_bfloat16(self, family: str, small: Configs, write_checkpoint: Write, monkeypatch: Any) -> None:
        """Tokens that go to the same experts as in float32: rounding turns a near tie of two experts either way."""
        folder, reference = write_checkpoint(plain(small[family]))
        ids = random_ids(300)
        ours: list[torch.Tensor] = []
        theirs: list[torch.Tensor] = []
        call = Router.__call__
        monkeypatch.setattr(Router, "__call__", lambda router, x: ours.append(call(router, x)[0]) or call(router, x))
        for layer in reference.model.layers:
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(lambda module, inputs, output: theirs.append(output[2]))
        expected, got = reference_logits(reference, ids), load_model(folder, dtype=torch.bfloat16).logits(ids)
        assert got.dtype == torch.float32 and len(ours) == len(theirs) > 1
        pairs = zip(ours, theirs, strict=True)
        same = torch.stack([(a.sort().values == b.sort().values).all(-1) for a, b in pairs]).all(0)
        assert same.float().mean() > 0.8
        assert (got - expected)[same].norm() <= BFLOAT16_TOLERANCE * expected[same].norm()

    def test_every_published_field_is_understood(self, family: str, published: Configs) -> None:
        assert unused_fields(published[family]) == {}
        config = parse_config(published[family])
        assert config.row_size == 576
        assert [config.is_moe_layer(layer) for layer in range(4)] == [
            layer >= published[family]["first_k_dense_replace"] for layer in range(4)
        ]


LITE_ATTENTION = {
    "self_attn.q_proj.weight": (3072, 2048),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 2048),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (4096, 512),
    "self_attn.o_proj.weight": (2048, 2048),
    "input_layernorm.weight": (2048,),
    "post_attention_layernorm.weight": (2048,),
}
LITE_EXPERT = {"gate_proj.weight": (1408, 2048), "up_proj.weight": (1408, 2048), "down_proj.weight": (2048, 1408)}


class TestPublishedNames:
    """The names and shapes in the published index files, for a layer of each kind; matrices are [out, in]."""

    def layer(self, config: dict[str, Any], index: int) -> dict[str, tuple[int, ...]]:
        start = f"model.layers.{index}."
        shapes = expected_shapes(parse_config(config))
        return {name.removeprefix(start): shape for name, shape in shapes.items() if name.startswith(start)}

    def test_v2_lite(self, published: Configs) -> None:
        config = published["DeepSeek-V2-Lite"]
        assert self.layer(config, 0) == LITE_ATTENTION | {
            "mlp.gate_proj.weight": (10944, 2048),
            "mlp.up_proj.weight": (10944, 2048),
            "mlp.down_proj.weight": (2048, 10944),
        }
        assert self.layer(config, 26) == (
            LITE_ATTENTION
            | {f"mlp.experts.{e}.{name}": shape for e in range(64) for name, shape in LITE_EXPERT.items()}
            | {
                "mlp.gate.weight": (64, 2048),
                "mlp.shared_experts.gate_proj.weight": (2816, 2048),
                "mlp.shared_experts.up_proj.weight": (2816, 2048),
                "mlp.shared_experts.down_proj.weight": (2048, 2816),
            }
        )

    def test_moonlight_adds_the_correction_bias(self, published: Configs) -> None:
        lite, moonlight = (self.layer(published[name], 1) for name in ("DeepSeek-V2-Lite", "Moonlight-16B-A3B"))
        assert moonlight == lite | {"mlp.gate.e_score_correction_bias": (64,)}

    def test_v3(self, published: Configs) -> None:
        layer = self.layer(published["DeepSeek-V3"], 60)
        assert len(layer) == 9 + 2 + 3 * 256 + 3
        assert {name: shape for name, shape in layer.items() if "experts" not in name} == {
            "self_attn.q_a_proj.weight": (1536, 7168),
            "self_attn.q_a_layernorm.weight": (1536,),
            "self_attn.q_b_proj.weight": (24576, 1536),
            "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
            "self_attn.kv_a_layernorm.weight": (512,),
            "self_attn.kv_b_proj.weight": (32768, 512),
            "self_attn.o_proj.weight": (7168, 16384),
            "input_layernorm.weight": (7168,),
            "post_attention_layernorm.weight": (7168,),
            "mlp.gate.weight": (256, 7168),
            "mlp.gate.e_score_correction_bias": (256,),
        }

    @pytest.mark.parametrize(
        ("family", "billions"), [("DeepSeek-V2", 235.7), ("DeepSeek-V2-Lite", 15.7), ("DeepSeek-V3", 671.0),
                                 ("Moonlight-16B-A3B", 16.0), ("Kimi-K2", 1026.0), ("JoyAI-LLM-Flash", 48.0)],
    )  # fmt: skip
    def test_all_weights_are_there(self, family: str, billions: float, published: Configs) -> None:
        """The sum of the shapes is the published number of parameters."""
        shapes = expected_shapes(parse_config(published[family]))
        assert sum(math.prod(shape) for shape in shapes.values()) / 1e9 == pytest.approx(billions, rel=0.02)


class TestForms:
    """One model in every form it may be stored in."""

    @pytest.fixture
    def config(self, small: Configs) -> dict[str, Any]:
        return plain(small["Kimi-K2"], num_nextn_predict_layers=1)

    def check(self, folder: Path, reference: Any, tolerance: float = TOLERANCE) -> None:
        ids = random_ids(70)
        assert (load_model(folder).logits(ids) - reference_logits(reference, ids)).abs().max() <= tolerance

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
    @pytest.mark.parametrize("stacked", [False, True])
    def test_stored_dtype_and_experts(
        self, dtype: torch.dtype, stacked: bool, config: dict[str, Any], write_checkpoint: Write
    ) -> None:
        folder, reference = write_checkpoint(config, dtype=dtype, save_original_format=not stacked)
        names = load_file(folder / "model.safetensors").keys()
        assert ("model.layers.1.mlp.experts.gate_up_proj" in names) == stacked
        assert ("model.layers.1.mlp.experts.0.gate_proj.weight" in names) != stacked
        self.check(folder, reference)

    @pytest.mark.parametrize("stacked", [False, True])
    def test_float8(self, stacked: bool, config: dict[str, Any], write_checkpoint: Write, tmp_path: Path) -> None:
        """Blocks of 128 x 128, the last ones partial: the same as their plain values, for every matrix."""
        if stacked:
            config = {**config, "moe_intermediate_size": 128}  # gate and up meet at a block's edge
        quantised = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
        folder, _ = write_checkpoint({**config, "quantization_config": quantised})
        tensors = load_file(folder / "model.safetensors")
        values = {name: tensor for name, tensor in tensors.items() if not name.endswith("_scale_inv")}
        for name, tensor in values.items():
            if name + "_scale_inv" in tensors:
                grown = torch.kron(tensors[name + "_scale_inv"], torch.ones(128, 128))
                values[name] = tensor.float() * grown[: tensor.shape[0], : tensor.shape[1]]
        assert sum(tensor.dtype == torch.float8_e4m3fn for tensor in tensors.values()) > 100
        if stacked:
            save_file(stack_experts(tensors, config), folder / "model.safetensors")
        (tmp_path / "plain").mkdir()
        save_file(values, tmp_path / "plain" / "model.safetensors")
        (tmp_path / "plain" / "config.json").write_text(json.dumps(config))
        ids = random_ids(70)
        assert torch.equal(load_model(folder).logits(ids), load_model(tmp_path / "plain").logits(ids))

    def test_prediction_layers_and_stored_frequencies_are_left_out(
        self, config: dict[str, Any], write_checkpoint: Write
    ) -> None:
        folder, reference = write_checkpoint(config)
        tensors = load_file(folder / "model.safetensors")
        extra = {
            f"model.layers.3.{name}.weight": torch.ones(4) for name in ("eh_proj", "enorm", "hnorm", "embed_tokens")
        }
        extra |= {n.replace("layers.2.", "layers.3."): t.clone() for n, t in tensors.items() if "layers.2." in n}
        extra["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
        save_file(tensors | extra, folder / "model.safetensors")
        self.check(folder, reference)
        (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 0}))
        with pytest.raises(UnsupportedModelError, match=r"unexpected model\.layers\.3\."):
            load_model(folder)

    @pytest.mark.parametrize("family", ["DeepSeek-V2-Lite", "DeepSeek-V3"])
    def test_every_second_layer_is_dense(self, family: str, small: Configs, write_checkpoint: Write) -> None:
        config = plain(small[family], first_k_dense_replace=1, num_hidden_layers=5, moe_layer_freq=2)
        folder, reference = write_checkpoint(config)
        assert [layer.mlp.__class__.__name__.lower()[-3:] for layer in reference.model.layers] == [
            "mlp", "mlp", "moe", "mlp", "moe",
        ]  # fmt: skip
        self.check(folder, reference)

    def test_tied_embeddings(self, config: dict[str, Any], write_checkpoint: Write) -> None:
        """The head is the embedding, whether or not the file holds it once more."""
        folder, reference = write_checkpoint({**config, "tie_word_embeddings": True})
        self.check(folder, reference)
        tensors = load_file(folder / "model.safetensors")
        assert "lm_head.weight" not in tensors
        save_file(tensors | {"lm_head.weight": torch.ones(150, 192)}, folder / "model.safetensors")
        self.check(folder, reference)

    @pytest.mark.parametrize("family", ["DeepSeek-V2-Lite", "Kimi-K2", "Moonlight-16B-A3B"])
    def test_newer_spelling_of_rope(self, family: str, small: Configs, write_checkpoint: Write) -> None:
        config = plain(small[family])
        scaling = dict(config["rope_scaling"] or {"type": "default"})
        newer = {**scaling, "rope_type": scaling.pop("type"), "rope_theta": config["rope_theta"]}
        newer.pop("type", None)
        folder, reference = write_checkpoint(config)
        without = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
        (folder / "config.json").write_text(json.dumps({**without, "rope_parameters": newer}))
        self.check(folder, reference)


def stack_experts(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Each layer's experts, and the scales of their blocks, as two tensors."""
    stacked = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    for layer in (1, 2):
        at = f"model.layers.{layer}.mlp.experts"

        def every(name: str, at: str = at) -> list[torch.Tensor]:
            return [tensors[f"{at}.{expert}.{name}"] for expert in range(config["n_routed_experts"])]

        def join(parts: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack([part.view(torch.int8) for part in parts]).view(parts[0].dtype)

        stacked[f"{at}.down_proj"] = join(every("down_proj.weight"))
        stacked[f"{at}.down_proj_scale_inv"] = torch.stack(every("down_proj.weight_scale_inv"))
        both = [
            torch.cat((g.view(torch.int8), u.view(torch.int8))).view(g.dtype)
            for g, u in zip(every("gate_proj.weight"), every("up_proj.weight"), strict=True)
        ]
        stacked[f"{at}.gate_up_proj"] = join(both)
        scales = zip(every("gate_proj.weight_scale_inv"), every("up_proj.weight_scale_inv"), strict=True)
        stacked[f"{at}.gate_up_proj_scale_inv"] = torch.stack([torch.cat(pair) for pair in scales])
    return stacked


def decode(model: Any, ids: list[int]) -> torch.Tensor:
    """float32 [n, vocab]: each of `ids` computed alone, its row in a slot of its own; unused memory is NaN."""
    runner = ModelRunner(model, capacity=3 * len(ids))
    runner.rows.fill_(float("nan"))
    slots = np.random.default_rng(0).permutation(3 * len(ids))[: len(ids)].astype(np.int32)
    base = np.full(3 * len(ids), -1, np.int32)
    logits = []
    for position, token in enumerate(ids):
        base[slots[position]] = position
        piece = Piece(np.array([token], np.int32), np.array([position]), slots[: position + 1], True)
        logits.append(runner.forward([piece], base))
    return torch.cat(logits)
