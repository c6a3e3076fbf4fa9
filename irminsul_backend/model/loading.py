"""From a model folder to a model: its config.json and its tensors, read and checked as the family's file says."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.config_fields import FieldReader
from irminsul_backend.hub.json_files import read_config
from irminsul_backend.hub.weight_files import LISTED, ModelFolder, TensorInfo
from irminsul_backend.model import checkpoint
from irminsul_backend.model.checkpoint import Checkpoint
from irminsul_backend.model.decoder import MLAModel
from irminsul_backend.model.model_config import ModelConfig
from irminsul_backend.model.progress import LoadProgress
from irminsul_backend.model.register import ARCHITECTURES, UNUSED, family_of, find_architecture

logger = logging.getLogger(__name__)


def try_config(raw: Mapping[str, Any]) -> tuple[ModelConfig | None, list[str]]:
    """Read the object of config.json: the config, or None and all its problems, each with field, value and limit."""
    config, read = _read_config(raw)
    return (None if read.problems else config), read.problems


def parse_config(raw: Mapping[str, Any]) -> ModelConfig:
    """Read the object of config.json; raises UnsupportedModelError naming every field that is not understood."""
    config, read = _read_config(raw)
    read.check("config.json")
    return config


def _read_config(raw: Mapping[str, Any]) -> tuple[ModelConfig, FieldReader]:
    """The config, which means nothing where the reader has problems, and the reader."""
    read = FieldReader(raw)
    architecture = find_architecture(read)
    return ARCHITECTURES[architecture].read_config(read, architecture), read


def load_config(folder: str | Path) -> ModelConfig:
    """Read `folder`/config.json. Fields that are neither read nor known to be without meaning are named in the log.

    Raises:
        UnsupportedModelError: the file is missing or not valid, or a field is not understood; names file or fields.
    """
    raw = read_config(folder)
    config = parse_config(raw)
    if unused := unused_fields(raw):
        logger.warning("config.json: not used: %s", ", ".join(f"{name} = {value!r}" for name, value in unused.items()))
    return config


def unused_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json that its family does not read and that UNUSED does not list; no null ones."""
    known = UNUSED | ARCHITECTURES[find_architecture(FieldReader(raw))].FIELDS
    return {name: value for name, value in raw.items() if name not in known and value is not None}


def find_problems(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> list[str]:
    """Return what keeps a checkpoint from being loaded, tensor by tensor.

    Args:
        tensors: what the files' headers say, by published name.
    """
    family = family_of(config)
    return checkpoint.find_problems(
        tensors,
        family.expected_shapes(config, tensors),
        lambda name: family.is_unused(name, config),
        config.weight_block_size,
    )


def memory_bytes(config: ModelConfig, itemsize: int) -> int:
    """Return the bytes of the model's tensors in memory with `itemsize` bytes an element; some stay float32."""
    return family_of(config).memory_bytes(config, itemsize)


def load_model(folder: str | Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> MLAModel:
    """Load a Hugging Face folder (config.json, *.safetensors) of a registered architecture.

    Raises:
        UnsupportedModelError: a file is missing, a config value is not understood, or the tensors do not fit.
    """
    if not Path(folder).is_dir():
        raise UnsupportedModelError(f"model folder {folder} does not exist")
    config = load_config(folder)
    files = ModelFolder(folder)
    if problems := find_problems(files.tensors, config):
        more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise UnsupportedModelError(
            f"the tensors do not fit config.json ({len(problems)} problems): {'; '.join(problems[:LISTED])}{more}"
        )
    family = family_of(config)
    weights = family.sanitize(config, files.tensors)
    source = Checkpoint(files, weights, config.weight_block_size, torch.device(device), dtype)
    what = f"loading {Path(folder).resolve().name} to {device}"
    with torch.inference_mode(), LoadProgress(source.num_bytes, what) as progress:
        source.on_read = progress.advance
        return family.build(config, source)
