"""The models that can be served: each architecture's name in config.json, and the file of its family.

To add a family, write its file beside `deepseek.py` with the functions of :class:`Family`, and name it in
ARCHITECTURES. Everything else (loading, refusals, `irminsul inspect`) finds it here.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from irminsul_backend.hub.config_fields import FieldReader
from irminsul_backend.model import deepseek
from irminsul_backend.model.checkpoint import Shape, TensorSource, Weight
from irminsul_backend.model.decoder import MLAModel
from irminsul_backend.model.model_config import ModelConfig


class Family(Protocol):
    """What a family's file holds. Its module is the object."""

    FIELDS: frozenset[str]
    """The fields of config.json that it reads or refuses."""

    def read_config(self, read: FieldReader, architecture: str) -> ModelConfig:
        """Read config.json of `architecture`; what is not understood becomes a problem of `read`."""
        ...

    def expected_shapes(self, config: ModelConfig, stored: Collection[str] = ()) -> dict[str, Shape]:
        """Return the shape of every tensor that a checkpoint of this config holds, by published name.

        `stored` are the names in the checkpoint, where there are several published forms to tell apart.
        """
        ...

    def is_unused(self, name: str, config: ModelConfig) -> bool:
        """Whether a tensor beyond the expected ones is known and left out."""
        ...

    def memory_bytes(self, config: ModelConfig, itemsize: int) -> int:
        """Return the bytes of the model's tensors in memory with `itemsize` bytes an element."""
        ...

    def sanitize(self, config: ModelConfig, stored: Collection[str] = ()) -> dict[str, Weight]:
        """Return the model's tensors by name, and which published ones fill each; `stored` as above."""
        ...

    def build(self, config: ModelConfig, source: TensorSource) -> MLAModel:
        """Make the model of the tensors that `sanitize` names."""
        ...


ARCHITECTURES: dict[str, Family] = {deepseek.V2: deepseek, deepseek.V3: deepseek}
"""Family by the name in `architectures` of config.json. This is the one list of what can be served."""
MODEL_TYPES = {
    "deepseek_v2": deepseek.V2,
    "deepseek_v3": deepseek.V3,
    "kimi_k2": deepseek.V3,
    "joyai_llm_flash": deepseek.V3,
}
"""The architecture that a model_type means where `architectures` is missing."""
UNUSED = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "eos_token_id", "ep_size", "head_dim", "id2label", "initializer_range",
    "is_encoder_decoder", "label2id", "max_window_layers", "model_type", "output_attentions", "output_hidden_states",
    "output_router_logits", "pad_token_id", "pretraining_tp", "problem_type", "qk_head_dim", "return_dict",
    "router_aux_loss_coef", "seq_aux", "torch_dtype", "transformers_version", "unk_token_id", "use_cache",
})  # fmt: skip
"""Fields of any family's config.json that say nothing about inference, repeat others, or are read here."""


def find_architecture(read: FieldReader) -> str:
    """Return the architecture that config.json names.

    One that is not served becomes a problem of `read`; the other fields are then read as those of the family that it
    resembles most, so that its further problems can be named too.
    """
    names, kind = read.value("architectures", []), read.value("model_type")
    for name in names if isinstance(names, list) else []:
        if isinstance(name, str) and name in ARCHITECTURES:
            return name
    if names:
        read.refuse("architectures", f"understood: {', '.join(ARCHITECTURES)}")
    elif not isinstance(kind, str) or kind not in MODEL_TYPES:
        read.refuse("model_type", f"understood: {', '.join(MODEL_TYPES)}")
    return MODEL_TYPES.get(str(kind), deepseek.V3)


def family_of(config: ModelConfig) -> Family:
    """Return the family that read `config`."""
    return ARCHITECTURES[config.architecture]
