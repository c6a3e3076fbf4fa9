"""A second family is one file and one line of the register: everything that loads, checks and refuses follows."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import CONFIG, write_model

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.config_fields import FieldReader
from irminsul_backend.model import deepseek, load_config, load_model, register
from irminsul_backend.model.attention import DenseContext
from irminsul_backend.model.checkpoint import Shape, Weight
from irminsul_backend.model.loading import unused_fields
from irminsul_backend.model.model_config import ModelConfig

NAME = "ToyForCausalLM"


def toy(name: str) -> str:
    """The toy family's name of a tensor that DeepSeek publishes as `name`."""
    return name.replace("model.", "toy.", 1) if name.startswith("model.") else f"toy.{name}"


def read_config(read: FieldReader, architecture: str) -> ModelConfig:
    """The toy family calls the hidden size d_model."""
    renamed = FieldReader({**read.raw, "hidden_size": read.value("d_model")}, problems=read.problems)
    return replace(deepseek.read_config(renamed, deepseek.V3), architecture=architecture)


def expected_shapes(config: ModelConfig, stored: Collection[str] = ()) -> dict[str, Shape]:
    return {toy(name): shape for name, shape in deepseek.expected_shapes(config).items()}


def sanitize(config: ModelConfig, stored: Collection[str] = ()) -> dict[str, Weight]:
    return {
        name: weight._replace(sources=tuple(s._replace(name=toy(s.name)) for s in weight.sources))
        for name, weight in deepseek.sanitize(config).items()
    }


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> None:
    functions = {
        "FIELDS": deepseek.FIELDS | {"d_model"},
        "read_config": read_config,
        "expected_shapes": expected_shapes,
        "is_unused": lambda name, config: name == "toy.note",
        "memory_bytes": deepseek.memory_bytes,
        "sanitize": sanitize,
        "build": deepseek.build,
    }
    monkeypatch.setitem(register.ARCHITECTURES, NAME, SimpleNamespace(**functions))  # type: ignore[arg-type]


def write_toy(folder: Path, **changed: Any) -> Path:
    """The same weights as in `folder`, in the toy family's form, in a folder beside it."""
    target = folder.with_name("toy")
    target.mkdir()
    tensors = load_file(folder / "model.safetensors")
    save_file({toy(n): t for n, t in tensors.items()} | {"toy.note": torch.zeros(1)}, target / "model.safetensors")
    config = {**CONFIG, "architectures": [NAME], "d_model": CONFIG["hidden_size"], **changed}
    (target / "config.json").write_text(json.dumps({n: v for n, v in config.items() if n != "hidden_size"}))
    return target


def logits(folder: Path) -> torch.Tensor:
    model = load_model(folder)
    ids = torch.arange(20) % CONFIG["vocab_size"]
    with torch.inference_mode():
        return model.compute_logits(model.forward(ids, torch.arange(20), DenseContext(model.config, 20, model.device)))


def test_a_registered_family_computes_what_its_twin_does(family: None, tmp_path: Path) -> None:
    (tmp_path / "deepseek").mkdir()
    write_model(tmp_path / "deepseek")
    folder = write_toy(tmp_path / "deepseek")
    assert torch.equal(logits(folder), logits(tmp_path / "deepseek"))
    assert load_config(folder).architecture == NAME
    assert unused_fields(json.loads((folder / "config.json").read_text()) | {"surprise": 1}) == {"surprise": 1}


def test_its_problems_are_told_in_its_own_names(family: None, tmp_path: Path) -> None:
    (tmp_path / "deepseek").mkdir()
    write_model(tmp_path / "deepseek", **{"model.norm.weight": torch.zeros(3)})
    with pytest.raises(UnsupportedModelError, match=r"toy\.norm\.weight is \[3\], must be \[16\]"):
        load_model(write_toy(tmp_path / "deepseek"))


def test_a_name_that_is_not_registered_is_refused_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "deepseek").mkdir()
    write_model(tmp_path / "deepseek")
    with pytest.raises(UnsupportedModelError, match=f"{NAME}.*understood: DeepseekV2ForCausalLM, "):
        load_model(write_toy(tmp_path / "deepseek"))
