"""A model folder with one layer, the shipped tokenizer and random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.model import parse_config
from irminsul_backend.model.random_weights import random_weights
from irminsul_backend.training.train import CONFIG


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A row of its only layer depends on its own token, so any reuse must give what no reuse gives."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(DEMO_MODEL / name, folder)
    values = CONFIG | {
        "vocab_size": json.loads((DEMO_MODEL / "config.json").read_text())["vocab_size"],
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 0,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    (folder / "config.json").write_text(json.dumps(values))
    save_file(random_weights(parse_config(values), seed=3), folder / "model.safetensors")
    return folder
