"""What loading costs in memory, and what it shows meanwhile."""

from __future__ import annotations

import json
import logging
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.model import load_model, parse_config, progress
from irminsul_backend.model.deepseek import expected_shapes
from irminsul_backend.model.loading import memory_bytes

Configs = dict[str, dict[str, Any]]
MB = 1_000_000


def write_random(folder: Path, config: dict[str, Any], *, float8: bool = False, shards: int = 1) -> int:
    """A checkpoint of `config` without a reference; returns the size of its largest tensor, in elements."""
    shapes = expected_shapes(parse_config(config))
    numbers = torch.randn(1 << 18).bfloat16()  # repeated: drawing every element would take longer than loading
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        std, size = 0.02 if len(shape) > 1 else 1.0, math.prod(shape)
        tensors[name] = numbers.repeat(-(-size // len(numbers)))[:size].view(shape) * std
        if float8 and name.endswith(("_proj.weight", "with_mqa.weight")):
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[name + "_scale_inv"] = torch.ones([-(-size // 128) for size in shape])
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
    else:
        where = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(tensors)}
        for file in set(where.values()):
            save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return max(math.prod(shape) for shape in shapes.values())


def measure(folder: Path, dtype: str) -> dict[str, Any]:
    script = Path(__file__).with_name("loading_memory.py")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run([sys.executable, str(script), str(folder), dtype], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


class TestPeakMemory:
    """Never more than the model and its largest tensor."""

    @pytest.mark.parametrize(("dtype", "form"), [("bfloat16", "plain"), ("float32", "shards"), ("bfloat16", "float8")])
    def test_of_a_process_of_its_own(self, dtype: str, form: str, small: Configs, tmp_path: Path) -> None:
        config = small["DeepSeek-V3"] | {
            "vocab_size": 2000, "hidden_size": 1024, "intermediate_size": 4096, "moe_intermediate_size": 256,
            "n_group": 1, "topk_group": 1, "n_routed_experts": 32, "first_k_dense_replace": 1, "num_hidden_layers": 3,
            "num_nextn_predict_layers": 0,
        }  # fmt: skip
        largest = write_random(tmp_path, config, float8=form == "float8", shards=3 if form == "shards" else 1)
        itemsize = getattr(torch, dtype).itemsize
        model = memory_bytes(parse_config(config), itemsize)
        measured = measure(tmp_path, dtype)
        assert measured["finite"]
        assert model > 90 * MB and measured["peak"] > 0.9 * model, "the measurement must see the model"
        assert measured["peak"] <= model + largest * 4 + 6 * MB  # 6 MB: Python's objects and the allocator's slack


class TestProgress:
    def test_reads_add_up_to_what_is_announced(
        self, small: Configs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_random(tmp_path, small["DeepSeek-V3"], float8=True)
        seen: list[progress.LoadProgress] = []
        enter = progress.LoadProgress.__enter__
        monkeypatch.setattr(progress.LoadProgress, "__enter__", lambda self: seen.append(self) or enter(self))
        load_model(tmp_path)
        assert seen[0].done == seen[0].total > 0

    def test_a_long_load_is_logged_a_short_one_is_not(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever the root logger's level."""
        clock = iter([0.0, 1.0, 20.0, 21.0, 40.0, 41.0])
        monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
        caplog.handler.setLevel(logging.INFO)
        with progress.LoadProgress(4 * 10**9, "loading m to cpu") as bar:
            for _ in range(4):
                bar.advance(10**9)
        lines = [record.getMessage() for record in caplog.records]
        assert lines == [
            "loading m to cpu: 2.0 of 4.0 GB (50 %) in 20 s, 0.10 GB/s",
            "loading m to cpu: 4.0 of 4.0 GB (100 %) in 40 s, 0.10 GB/s",
            "loading m to cpu: 4.0 of 4.0 GB (100 %) in 41 s, 0.10 GB/s",
        ]
        caplog.clear()
        monkeypatch.undo()
        with progress.LoadProgress(10, "loading m to cpu") as bar:
            bar.advance(10)
        assert not caplog.records


class TestUnalignedExperts:
    def test_are_refused_by_name(self, small: Configs, tmp_path: Path) -> None:
        write_random(tmp_path, {**small["DeepSeek-V2-Lite"], "moe_intermediate_size": 12})
        load_model(tmp_path)
        with pytest.raises(
            UnsupportedModelError, match="moe_intermediate_size is 12; experts in bfloat16 need a multiple of 8"
        ):
            load_model(tmp_path, dtype=torch.bfloat16)


@pytest.mark.skipif("IRMINSUL_LARGE_TESTS" not in os.environ, reason="writes 2.2 GB; set IRMINSUL_LARGE_TESTS=1 to run")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_two_layers_of_v2_lite_in_their_true_shapes(dtype: str, published: Configs, tmp_path: Path) -> None:
    """pytest tests/model/test_loading.py -k v2_lite -s"""
    config = {**published["DeepSeek-V2-Lite"], "num_hidden_layers": 2}
    largest = write_random(tmp_path, config)
    model = memory_bytes(parse_config(config), getattr(torch, dtype).itemsize)
    measured = measure(tmp_path, dtype)
    print(f"{dtype}: model {model / 1e9:.2f} GB", measured)
    assert measured["finite"] and measured["peak"] <= model + largest * 4
