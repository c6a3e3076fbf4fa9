"""Checkpoint: the tensors of a Hugging Face folder, checked against the config first, then read one by one.

Files are mapped into memory and each tensor is converted to the target dtype on its own, so loading never holds the
model twice. Published layouts are turned into ours here: float8 blocks, interleaved rotary rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.model.config import ModelConfig

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SCALE = "_scale_inv"
"""Suffix of a float8 weight's block scales: value = weight * scale of its block (published DeepSeek-V3)."""
LISTED = 8
"""Most tensor names that one error message spells out."""

Read = Callable[[str], torch.Tensor]


class Checkpoint:
    """The safetensors of one model folder.

    Raises UnsupportedModelError from the constructor if a file is missing or unreadable, or if the tensors' names and
    shapes are not exactly those the config asks for.
    """

    def __init__(self, folder: str | Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config = config
        self.device = device
        self.dtype = dtype
        self._files = _open_files(Path(folder))
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118
        self._check()

    def read(self, name: str) -> torch.Tensor:
        """Tensor `name` in the target dtype on the target device; float8 blocks are scaled in float32."""
        tensor = self._where[name].get_tensor(name)
        if name + SCALE in self._where:
            assert self.config.weight_block_size is not None
            scale = self._where[name + SCALE].get_tensor(name + SCALE)
            tensor = scale_blocks(tensor, scale, self.config.weight_block_size)
        return tensor.to(device=self.device, dtype=self.dtype)

    def read_float32(self, name: str) -> torch.Tensor:
        """Tensor `name` in float32: the router's weights, whose rounding would change the choice of experts."""
        return self._where[name].get_tensor(name).to(device=self.device, dtype=torch.float32)

    def _check(self) -> None:
        expected = expected_shapes(self.config)
        found = {name: tuple(file.get_slice(name).get_shape()) for name, file in self._where.items()}
        problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
        for name, shape in found.items():
            if name in expected:
                if shape != expected[name]:
                    problems.append(f"{name} is {list(shape)}, must be {list(expected[name])}")
            elif self._is_scale(name, shape, found) or self._is_unused(name):
                continue
            else:
                problems.append(f"unexpected {name} {list(shape)}")
        if problems:
            more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
            raise UnsupportedModelError(
                f"the tensors do not fit config.json ({len(problems)} problems): {'; '.join(problems[:LISTED])}{more}"
            )

    def _is_scale(self, name: str, shape: tuple[int, ...], found: dict[str, tuple[int, ...]]) -> bool:
        weight, block = found.get(name.removesuffix(SCALE)), self.config.weight_block_size
        if not name.endswith(SCALE) or weight is None or block is None or len(weight) != 2:
            return False
        return shape == tuple(-(-size // side) for size, side in zip(weight, block, strict=True))

    def _is_unused(self, name: str) -> bool:
        """Layers of the multi-token prediction heads, a tied head, and the frequencies that old checkpoints carry."""
        layers = range(self.config.num_layers, self.config.num_layers + self.config.num_nextn_predict_layers)
        prediction = any(name.startswith(f"model.layers.{layer}.") for layer in layers)
        tied = name == "lm_head.weight" and self.config.tie_word_embeddings
        return prediction or tied or name.endswith(".rotary_emb.inv_freq")


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of this config holds, by published name; matrices are [out, in]."""
    hidden, heads = config.hidden_size, config.num_heads
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)

    def mlp(prefix: str, inner: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = shapes[f"{prefix}.up_proj.weight"] = (inner, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, inner)

    for layer in range(config.num_layers):
        at = f"model.layers.{layer}."
        shapes[at + "input_layernorm.weight"] = shapes[at + "post_attention_layernorm.weight"] = (hidden,)
        attention = at + "self_attn."
        query = (heads * (config.qk_nope_head_dim + config.qk_rope_head_dim), config.q_lora_rank or hidden)
        if config.q_lora_rank is None:
            shapes[attention + "q_proj.weight"] = query
        else:
            shapes[attention + "q_a_proj.weight"] = (config.q_lora_rank, hidden)
            shapes[attention + "q_a_layernorm.weight"] = (config.q_lora_rank,)
            shapes[attention + "q_b_proj.weight"] = query
        shapes[attention + "kv_a_proj_with_mqa.weight"] = (config.row_size, hidden)
        shapes[attention + "kv_a_layernorm.weight"] = (config.kv_lora_rank,)
        expanded = heads * (config.qk_nope_head_dim + config.v_head_dim)
        shapes[attention + "kv_b_proj.weight"] = (expanded, config.kv_lora_rank)
        shapes[attention + "o_proj.weight"] = (hidden, heads * config.v_head_dim)
        if not config.is_moe_layer(layer):
            mlp(at + "mlp", config.intermediate_size)
            continue
        shapes[at + "mlp.gate.weight"] = (config.n_routed_experts, hidden)
        if config.topk_method == "noaux_tc":
            shapes[at + "mlp.gate.e_score_correction_bias"] = (config.n_routed_experts,)
        for expert in range(config.n_routed_experts):
            mlp(f"{at}mlp.experts.{expert}", config.moe_intermediate_size)
        if config.n_shared_experts:
            mlp(at + "mlp.shared_experts", config.moe_intermediate_size * config.n_shared_experts)
    return shapes


def half_split_rows(weight: torch.Tensor, heads: int, rope_dim: int, interleaved: bool) -> torch.Tensor:
    """Reorder the last `rope_dim` output rows of each head of `weight` [heads * width, in] to the half-split layout.

    Row 2i goes to i and row 2i + 1 to i + rope_dim/2. Scores do not change: queries and keys are reordered alike.
    """
    if not interleaved:
        return weight
    width = weight.shape[0] // heads
    rotary = torch.arange(width - rope_dim, width)
    order = torch.cat((torch.arange(width - rope_dim), rotary[0::2], rotary[1::2])).to(weight.device)
    return weight.view(heads, width, -1)[:, order].reshape(weight.shape)


def scale_blocks(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float32 [m, n] = weight [m, n] * scale [ceil(m / b0), ceil(n / b1)] of the element's block."""
    rows, columns = weight.shape
    full = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * full


def _open_files(folder: Path) -> list[Any]:
    index = folder / INDEX
    try:
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = [SINGLE]
    except (ValueError, KeyError, AttributeError) as error:
        raise UnsupportedModelError(f"{index} is not a safetensors index: {error!r}") from error
    if missing := [name for name in names if not (folder / name).is_file()]:
        hint = f" (nor {INDEX})" if names == [SINGLE] else f" named in {INDEX}"
        raise UnsupportedModelError(f"model folder {folder} lacks {', '.join(missing[:LISTED])}{hint}")
    files = []
    for name in names:
        try:
            files.append(safe_open(str(folder / name), framework="pt", device="cpu"))
        except (SafetensorError, OSError) as error:
            raise UnsupportedModelError(f"{folder / name} is not a readable safetensors file: {error}") from error
    return files
