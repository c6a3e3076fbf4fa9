"""MLA models: the register of architectures, the families' files, layers, and loading."""

from irminsul_backend.model.attention import AttentionContext
from irminsul_backend.model.decoder import MLAModel
from irminsul_backend.model.loading import load_config, load_model, parse_config
from irminsul_backend.model.model_config import ModelConfig
from irminsul_backend.model.rope import Rope

__all__ = ["AttentionContext", "MLAModel", "ModelConfig", "Rope", "load_config", "load_model", "parse_config"]
