"""`irminsul inspect`: figures and problems of a model folder, from its files' headers."""

from __future__ import annotations

import json
import math
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from irminsul_backend.commands.inspect import GIB, inspect_folder
from irminsul_backend.commands.main import main
from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.model import parse_config
from irminsul_backend.model.deepseek import expected_shapes

LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "first_k_dense_replace": 1,
    "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 10944, "kv_lora_rank": 512,
    "max_position_embeddings": 163840, "moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1,
    "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False, "num_attention_heads": 16,
    "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
                     "original_max_position_embeddings": 4096, "type": "yarn"},
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "tie_word_embeddings": False, "topk_group": 1,
    "topk_method": "greedy", "v_head_dim": 128, "vocab_size": 102400,
}  # fmt: skip
V3: dict[str, Any] = {
    **LITE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "first_k_dense_replace": 3,
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 4,
    "topk_method": "noaux_tc", "vocab_size": 129280,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip


def write_hollow(folder: Path, config: dict[str, Any], shards: int, float8: bool = False) -> None:
    """A folder of the config's true size whose files have headers and, behind them, holes: no disk is used."""
    headers: list[dict[str, Any]] = [{} for _ in range(shards)]
    ends = [0] * shards
    where = {}

    def add(index: int, name: str, dtype: str, itemsize: int, shape: Any) -> None:
        start = ends[index]
        ends[index] += math.prod(shape) * itemsize
        headers[index][name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, ends[index]]}
        where[name] = f"model-{index + 1:05}-of-{shards:06}.safetensors"

    for i, (name, shape) in enumerate(expected_shapes(parse_config(config)).items()):
        if float8 and name.endswith(("proj.weight", "mqa.weight")):
            add(i % shards, name, "F8_E4M3", 1, shape)
            add(i % shards, name + "_scale_inv", "F32", 4, [-(-size // 128) for size in shape])
        else:
            add(i % shards, name, "BF16", 2, shape)
    for index, header in enumerate(headers):
        text = json.dumps(header).encode()
        path = folder / f"model-{index + 1:05}-of-{shards:06}.safetensors"
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + ends[index])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (DEMO_MODEL / name).exists():
            (folder / name).write_bytes((DEMO_MODEL / name).read_bytes())
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 7]}')


@pytest.fixture
def lite(tmp_path: Path) -> Path:
    write_hollow(tmp_path, LITE, 4)
    return tmp_path


@pytest.fixture
def short(tmp_path: Path) -> Path:
    """Three layers of it."""
    write_hollow(tmp_path, {**LITE, "num_hidden_layers": 3}, 4)
    return tmp_path


def change(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


class TestFigures:
    def test_v2_lite(self, lite: Path) -> None:
        report = inspect_folder(lite, memory=80 * GIB)
        assert report["servable"] and not report["problems"]
        assert report["layers"] == {"dense": 1, "moe": 26, "prediction": 0}
        assert report["disk"]["bytes"] == 15_706_484_224 * 2  # the published number of parameters
        assert report["disk"]["bytes_by_dtype"] == {"BF16": report["disk"]["bytes"]}
        assert report["text"]["chat_template"] and report["text"]["end_ids"] == [1, 7]
        assert report["rope"] == {"type": "yarn", "theta": 10000, "factor": 40, "original_context_tokens": 4096}
        half = report["serving"]["bfloat16"]
        routers = 26 * 64 * 2048
        assert half["weight_bytes"] == report["disk"]["bytes"] + 2 * routers
        assert half["row_bytes_per_token"] == 27 * 576 * 2 == 31104
        assert half["tokens_that_fit"] == int((80 * GIB - half["weight_bytes"]) * 0.8) // 31104
        assert report["serving"]["float32"]["row_bytes_per_token"] == 2 * 31104

    def test_float8_in_many_files(self, tmp_path: Path) -> None:
        """A folder of 46 GB that takes no room on the disk: no weight is there to be read."""
        write_hollow(tmp_path, {**V3, "num_hidden_layers": 7}, 20, float8=True)
        report = inspect_folder(tmp_path, memory=100 * GIB)
        assert report["problems"] == []
        assert report["disk"]["files"] == 20 and report["disk"]["bytes"] > 46e9
        assert list(report["disk"]["bytes_by_dtype"]) == ["F8_E4M3", "BF16", "F32"]
        assert report["layers"] == {"dense": 3, "moe": 4, "prediction": 1}
        assert report["experts"] == {
            "routed": 256, "per_token": 8, "shared": 1, "groups": 8, "kept_groups": 4, "routing": "noaux_tc",
        }  # fmt: skip
        assert report["float8_block"] == [128, 128]

    def test_too_little_memory(self, short: Path) -> None:
        report = inspect_folder(short, memory=4 * GIB)
        assert report["servable"] and not report["serving"]["float32"]["fits"] and report["serving"]["bfloat16"]["fits"]
        report = inspect_folder(short, memory=2 * GIB)
        assert not report["servable"] and report["serving"]["bfloat16"]["tokens_that_fit"] == 0
        assert report["problems"] == ["the weights take 3.1 GiB at least; 2.0 GiB are there"]


class TestProblems:
    def test_all_at_once(self, short: Path) -> None:
        """Of the config, of the files and of the text, in one run."""
        change(short, hidden_act="gelu", topk_method="random", index_topk=2048, rope_scaling={"type": "linear"})
        (short / "model-00002-of-000004.safetensors").unlink()
        (short / "tokenizer.json").unlink()
        problems = "\n".join(inspect_folder(short, memory=80 * GIB)["problems"])
        for part in (
            "hidden_act is 'gelu'",
            "topk_method is 'random'",
            "index_topk is 2048",
            "rope_scaling.type is 'linear'",
            "lacks model-00002-of-000004.safetensors",
            "tokenizer.json",
        ):
            assert part in problems

    def test_tensors_that_do_not_fit(self, short: Path) -> None:
        change(short, num_hidden_layers=4)
        report = inspect_folder(short, memory=80 * GIB)
        assert any("missing model.layers.3.input_layernorm.weight [2048]" in problem for problem in report["problems"])
        assert report["problems"][-1] == "195 more tensors do not fit config.json"

    def test_unused_fields_and_missing_text_are_no_problem(self, short: Path) -> None:
        change(short, made_up=3, aux_loss_alpha=0.1)
        for name in ("chat_template.jinja", "tokenizer_config.json", "generation_config.json"):
            (short / name).unlink(missing_ok=True)
        report = inspect_folder(short, memory=80 * GIB)
        assert report["servable"] and report["unused_fields"] == {"made_up": 3}
        assert len(report["notes"]) == 2 and "end id" in report["notes"][0] and "template" in report["notes"][1]

    def test_a_tokenizer_larger_than_the_vocabulary(self, tmp_path: Path) -> None:
        write_hollow(tmp_path, {**LITE, "vocab_size": 100, "num_hidden_layers": 2}, 1)
        assert any("vocab_size" in problem for problem in inspect_folder(tmp_path)["problems"])

    @pytest.mark.parametrize("size", [4, 100, 2_000_000])
    def test_a_damaged_file_is_named(self, size: int, short: Path) -> None:
        path = short / "model-00003-of-000004.safetensors"
        with path.open("r+b") as file:
            file.truncate(size)
        assert any(f"{path} is not a readable" in problem for problem in inspect_folder(short)["problems"])

    @pytest.mark.parametrize(
        ("fields", "part"),
        [
            ({"architectures": [["x"]]}, "architectures is [['x']]; understood"),
            ({"architectures": None, "model_type": ["x"]}, "model_type is ['x']; understood"),
            ({"rope_theta": 10**400}, "(401 characters); it must be from 1e-30 to 1e+30"),
            ({"rms_norm_eps": 10**400}, "(401 characters); it must be from 1e-30 to 1e+30"),
            ({"rope_scaling": {**LITE["rope_scaling"], "beta_fast": 1e-308}}, "rope_scaling.beta_fast is 1e-308"),
            (
                {"rope_scaling": {**LITE["rope_scaling"], "original_max_position_embeddings": 1e308}},
                "rope_scaling.original_max_position_embeddings is 1e+308",
            ),
            ({"qk_rope_head_dim": 2 * 10**12}, "qk_rope_head_dim is 2000000000000; it must be at most 100,000"),
            ({"hidden_size": 10**8}, "hidden_size is 100000000; it must be at most 10,000,000"),
            ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; it must be at most 1,000"),
            ({"n_routed_experts": 10**8}, "n_routed_experts is 100000000; it must be at most 10,000"),
            ({"num_hidden_layers": 1000, "n_routed_experts": 9000}, "with 1000 layers it must be at most 200"),
            ({"num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000; it must be at most 1,000"),
        ],
    )
    def test_extreme_values_are_named(self, fields: dict[str, Any], part: str, short: Path) -> None:
        change(short, **fields)
        problems = inspect_folder(short, memory=80 * GIB)["problems"]
        assert any(problem.startswith("config.json: ") and part in problem for problem in problems), problems

    @pytest.mark.parametrize(
        ("name", "text", "part"),
        [
            ("config.json", "[" * 100_000, "nested more than 64 deep"),
            ("config.json", '{"a":' + "[" * 65 + "]" * 65 + "}", "nested more than 64 deep"),
            ("model.safetensors.index.json", "[]", "must be an object whose weight_map"),
            ("model.safetensors.index.json", '{"weight_map": []}', "must be an object whose weight_map"),
            ("model.safetensors.index.json", '{"weight_map": {"a": 5}}', "weight_map gives a the file 5"),
            ("tokenizer_config.json", '{"additional_special_tokens": 5}', "additional_special_tokens"),
            ("tokenizer_config.json", '{"added_tokens_decoder": [1]}', "is [1]; it must be an object"),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"9": {"content": "q", "special": "yes"}}}',
                "token 9 special = 'yes'; it must be true or false",
            ),
            (
                "tokenizer_config.json",
                '{"added_tokens_decoder": {"1000000000": {"content": "q"}}}',
                "id 1000000000; it must be at most 1,000,000",
            ),
        ],
    )
    @pytest.mark.parametrize("tiktoken", [False, True])
    def test_malformed_json_is_named(self, name: str, text: str, part: str, tiktoken: bool, short: Path) -> None:
        (short / name).write_text(text)
        if tiktoken:
            (short / "tokenizer.json").unlink()
            (short / "tiktoken.model").write_text("")
        problems = inspect_folder(short, memory=80 * GIB)["problems"]
        assert any(str(short / name) in problem and part in problem for problem in problems), problems

    @pytest.mark.parametrize(
        ("header", "part"),
        [
            ("[]", "its header is []"),
            ("[" * 100_000, "nested more than 64 deep"),
            ('{"a": 5}', "shape of a is None"),
            ('{"a": {"shape": [1e999], "dtype": "F32", "data_offsets": [0, 0]}}', "shape of a is [inf]"),
            ('{"a": {"shape": [0], "dtype": [], "data_offsets": [0, 0]}}', "dtype of a is []"),
            ('{"a": {"shape": [0], "dtype": "F32", "data_offsets": [4, 0]}}', "data_offsets of a is [4, 0]"),
        ],
    )
    def test_malformed_headers_are_named(self, header: str, part: str, short: Path) -> None:
        path = short / "model-00003-of-000004.safetensors"
        path.write_bytes(struct.pack("<Q", len(header)) + header.encode())
        problems = inspect_folder(short, memory=80 * GIB)["problems"]
        assert any(f"{path} is not a readable" in problem and part in problem for problem in problems), problems

    def test_an_end_id_beyond_the_vocabulary_is_a_note(self, short: Path) -> None:
        change(short, eos_token_id=999_999)
        report = inspect_folder(short, memory=80 * GIB)
        assert report["servable"] and any("end ids 999999 are never generated" in note for note in report["notes"])


class TestCommand:
    def test_text(self, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(short), "--memory", "80"]) == 0
        out = capsys.readouterr().out
        for part in (
            "can be served",
            "1 dense, 2 MoE",
            "64 routed, 6 a token",
            "3,456 bytes",
            "yarn x 40 from 4,096",
        ):
            assert part in out

    def test_json_and_exit_code(self, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
        change(short, hidden_act="gelu")
        assert main(["inspect", str(short), "--json"]) == 1
        report = json.loads(capsys.readouterr().out)
        assert report["servable"] is False and report["memory_bytes"] > 0

    def test_no_folder(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(tmp_path / "nowhere")]) == 1
        assert "nowhere does not exist" in capsys.readouterr().out

    def test_a_file_instead_of_a_folder(self, short: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["inspect", str(short / "config.json")]) == 1
        assert "config.json is a file; give the folder" in capsys.readouterr().out

    def test_a_reader_that_has_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as closed:
            monkeypatch.setattr(sys, "stdout", closed)
            assert main(["inspect", str(DEMO_MODEL), "--json"]) == 0

    def test_the_shipped_model_can_be_served(self) -> None:
        assert main(["inspect", str(DEMO_MODEL)]) == 0
