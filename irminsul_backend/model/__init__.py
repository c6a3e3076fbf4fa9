"""MLA models of the DeepSeek-V2/V3 family: config, weights, forward pass."""

from irminsul_backend.model.deepseek import AttentionContext, MLAModel, load_model
from irminsul_backend.model.model_config import ModelConfig
from irminsul_backend.model.rope import Rope

__all__ = ["AttentionContext", "MLAModel", "ModelConfig", "Rope", "load_model"]
