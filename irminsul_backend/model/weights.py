"""Published checkpoints become the tensors of MLAModel here, in one place: :func:`sanitize`.

Two tables meet in it. :func:`expected_shapes` lists what a checkpoint holds, by published name; :func:`model_weights`
lists what the model holds, and for each tensor the published ones that fill it: the query's and the row's projections
lie in one matrix, so do gate and up; kv_b is split for absorption; all experts of a layer are stacked; rotary rows are
half-split. :class:`Checkpoint` then makes one tensor at a time: it is allocated once, at its final size, and each
published tensor is copied into its place, so a layer never exists twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.weight_files import FLOAT8, FLOATS, LISTED, ModelFolder, TensorInfo
from irminsul_backend.model.model_config import ModelConfig

SCALE = "_scale_inv"
"""Suffix of a float8 weight's block scales: value = weight * scale of its block (published DeepSeek-V3)."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """A published tensor that fills (a part of) one of the model's."""

    name: str
    copy: Callable[[Tensor, Tensor], object]
    """Copies (into the model's tensor, from the published one); the dtype may change on the way."""
    expert: int | None = None
    """Only this entry of a stacked tensor is meant."""


@dataclass(frozen=True)
class Weight:
    """One tensor of the model in memory."""

    shape: Shape
    sources: tuple[Source, ...]
    float32: bool = False
    """Kept in float32 whatever the model's dtype: the router's, whose rounding would change the choice of experts."""


def sanitize(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> dict[str, Weight]:
    """Turn a checkpoint in any published form into the model's tensors, by name.

    Understood: experts one by one (`experts.3.gate_proj.weight`) or stacked (`experts.gate_up_proj` [E, 2I, H] and
    `experts.down_proj` [E, H, I], as transformers 5 keeps them); float32, bfloat16 and float16; float8 with a scale per
    block (`weight_scale_inv`; the last block of a row or column may be partial). Left out: prediction layers behind
    the model's own, a head that is tied to the embedding, stored rotary frequencies.

    Args:
        tensors: what the files' headers say, by published name.

    Raises:
        UnsupportedModelError: a tensor is missing, unexpected, wrongly shaped or of another dtype; they are named.
    """
    if problems := find_problems(tensors, config):
        more = f"; and {len(problems) - LISTED} more" if len(problems) > LISTED else ""
        raise UnsupportedModelError(
            f"the tensors do not fit config.json ({len(problems)} problems): {'; '.join(problems[:LISTED])}{more}"
        )
    return model_weights(config, _stacked_layers(tensors, config))


def find_problems(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> list[str]:
    """Every tensor that keeps :func:`sanitize` from understanding a checkpoint, with what is wrong with it."""
    expected = expected_shapes(config, _stacked_layers(tensors, config))
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    for name, info in tensors.items():
        if name in expected:
            problems += _check_tensor(name, info, expected[name], tensors, config)
        elif not (name.endswith(SCALE) and name.removesuffix(SCALE) in expected) and not _is_unused(name, config):
            problems.append(f"unexpected {name} {list(info.shape)}")
    return problems


def expected_shapes(config: ModelConfig, stacked: set[int] | None = None) -> dict[str, Shape]:
    """Every tensor that a checkpoint of this config holds, by published name; matrices are [out, in].

    Args:
        stacked: layers whose routed experts are two stacked tensors instead of three matrices each.
    """
    hidden, heads = config.hidden_size, config.num_heads
    shapes: dict[str, Shape] = {
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
        experts, inner = config.n_routed_experts, config.moe_intermediate_size
        shapes[at + "mlp.gate.weight"] = (experts, hidden)
        if config.topk_method == "noaux_tc":
            shapes[at + "mlp.gate.e_score_correction_bias"] = (experts,)
        if stacked and layer in stacked:
            shapes[at + "mlp.experts.gate_up_proj"] = (experts, 2 * inner, hidden)
            shapes[at + "mlp.experts.down_proj"] = (experts, hidden, inner)
        else:
            for expert in range(experts):
                mlp(f"{at}mlp.experts.{expert}", inner)
        if config.n_shared_experts:
            mlp(at + "mlp.shared_experts", inner * config.n_shared_experts)
    return shapes


def model_weights(config: ModelConfig, stacked: set[int] | None = None) -> dict[str, Weight]:
    """The tensors of MLAModel and what fills them; `stacked` as in :func:`expected_shapes`. Matrices are [out, in]."""
    hidden, heads, rank = config.hidden_size, config.num_heads, config.kv_lora_rank
    dn, dr, dv = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
    weights: dict[str, Weight] = {}

    def whole(name: str, shape: Shape, published: str, float32: bool = False) -> None:
        weights[name] = Weight(shape, (Source(published, Tensor.copy_),), float32)

    def gated(name: str, published: str, inner: int) -> None:
        halves = [(f"{published}.gate_proj.weight", 0), (f"{published}.up_proj.weight", inner)]
        sources = tuple(Source(half, partial(copy_rows, start)) for half, start in halves)
        weights[f"{name}.gate_up"] = Weight((2 * inner, hidden), sources)
        whole(f"{name}.down", (hidden, inner), f"{published}.down_proj.weight")

    whole("embedding", (config.vocab_size, hidden), "model.embed_tokens.weight")
    whole("norm", (hidden,), "model.norm.weight")
    if not config.tie_word_embeddings:
        whole("head", (config.vocab_size, hidden), "lm_head.weight")
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        whole(f"{ours}.input_norm", (hidden,), f"{theirs}.input_layernorm.weight")
        whole(f"{ours}.post_norm", (hidden,), f"{theirs}.post_attention_layernorm.weight")

        attention = f"{theirs}.self_attn"
        rotary_query = partial(copy_rotary, 0, heads * (dn + dr), heads, dr, config.rope_interleave)
        if config.q_lora_rank is None:
            first = heads * (dn + dr)
            query = Source(f"{attention}.q_proj.weight", rotary_query)
        else:
            first = config.q_lora_rank
            query = Source(f"{attention}.q_a_proj.weight", partial(copy_rows, 0))
            whole(f"{ours}.attention.q_norm", (first,), f"{attention}.q_a_layernorm.weight")
            q_b = Source(f"{attention}.q_b_proj.weight", rotary_query)
            weights[f"{ours}.attention.q_b"] = Weight((heads * (dn + dr), first), (q_b,))
        # The query's first projection and the row's share their input: one product [query, R, dr].
        rotary_row = partial(copy_rotary, first, first + config.row_size, 1, dr, config.rope_interleave)
        row = Source(f"{attention}.kv_a_proj_with_mqa.weight", rotary_row)
        weights[f"{ours}.attention.down"] = Weight((first + config.row_size, hidden), (query, row))
        whole(f"{ours}.attention.kv_norm", (rank,), f"{attention}.kv_a_layernorm.weight")
        kv_b = f"{attention}.kv_b_proj.weight"
        weights[f"{ours}.attention.w_uk"] = Weight((heads, dn, rank), (Source(kv_b, copy_key_half),))
        weights[f"{ours}.attention.w_uv"] = Weight((heads, rank, dv), (Source(kv_b, copy_value_half),))
        whole(f"{ours}.attention.o", (hidden, heads * dv), f"{attention}.o_proj.weight")

        if not config.is_moe_layer(layer):
            gated(f"{ours}.feed_forward", f"{theirs}.mlp", config.intermediate_size)
            continue
        count, inner = config.n_routed_experts, config.moe_intermediate_size
        whole(f"{ours}.feed_forward.router", (count, hidden), f"{theirs}.mlp.gate.weight", float32=True)
        if config.topk_method == "noaux_tc":
            bias = f"{theirs}.mlp.gate.e_score_correction_bias"
            whole(f"{ours}.feed_forward.router_bias", (count,), bias, float32=True)
        gate_up, down = _experts(f"{theirs}.mlp.experts", count, inner, bool(stacked and layer in stacked))
        weights[f"{ours}.feed_forward.experts.gate_up"] = Weight((count, 2 * inner, hidden), gate_up)
        weights[f"{ours}.feed_forward.experts.down"] = Weight((count, hidden, inner), down)
        if config.n_shared_experts:
            gated(f"{ours}.feed_forward.shared", f"{theirs}.mlp.shared_experts", inner * config.n_shared_experts)
    return weights


def _experts(prefix: str, count: int, inner: int, stacked: bool) -> tuple[tuple[Source, ...], tuple[Source, ...]]:
    gate_up, down = [], []
    for e in range(count):
        into = partial(copy_expert, e, 0)
        if stacked:
            gate_up.append(Source(f"{prefix}.gate_up_proj", into, expert=e))
            down.append(Source(f"{prefix}.down_proj", into, expert=e))
        else:
            gate_up.append(Source(f"{prefix}.{e}.gate_proj.weight", into))
            gate_up.append(Source(f"{prefix}.{e}.up_proj.weight", partial(copy_expert, e, inner)))
            down.append(Source(f"{prefix}.{e}.down_proj.weight", into))
    return tuple(gate_up), tuple(down)


def copy_rows(start: int, ours: Tensor, theirs: Tensor) -> None:
    """Copy [m, n] into rows `start`.. of [M, n]."""
    ours[start : start + theirs.shape[0]].copy_(theirs)


def copy_expert(expert: int, start: int, ours: Tensor, theirs: Tensor) -> None:
    """Copy [m, n] into rows `start`.. of entry `expert` of [E, M, n]."""
    copy_rows(start, ours[expert], theirs)


def copy_rotary(
    start: int, end: int, heads: int, rope_dim: int, interleaved: bool, ours: Tensor, theirs: Tensor
) -> None:
    """Copy [heads * width, n] into rows `start` to `end` of [M, n], rotary rows in the half-split layout.

    The last `rope_dim` rows of a head turn: 2i goes to i and 2i + 1 to i + rope_dim / 2. Scores do not change: queries
    and keys are reordered alike.
    """
    into, source = ours[start:end].unflatten(0, (heads, -1)), theirs.unflatten(0, (heads, -1))
    if not interleaved:
        into.copy_(source)
        return
    plain, half = into.shape[1] - rope_dim, rope_dim // 2
    into[:, :plain].copy_(source[:, :plain])
    into[:, plain : plain + half].copy_(source[:, plain::2])
    into[:, plain + half :].copy_(source[:, plain + 1 :: 2])


def copy_key_half(ours: Tensor, theirs: Tensor) -> None:
    """kv_b [H * (dn + dv), R] -> w_uk [H, dn, R]"""
    ours.copy_(theirs.unflatten(0, (ours.shape[0], -1))[:, : ours.shape[1]])


def copy_value_half(ours: Tensor, theirs: Tensor) -> None:
    """kv_b [H * (dn + dv), R] -> w_uv [H, R, dv]"""
    ours.copy_(theirs.unflatten(0, (ours.shape[0], -1))[:, -ours.shape[2] :].transpose(1, 2))


def scale_blocks(weight: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """float32 [m, n] = float8 weight [m, n] * scale [ceil(m / b0), ceil(n / b1)] of the element's block."""
    out = weight.float()
    by_row = scale.float().repeat_interleave(block[0], 0)[: out.shape[0]]
    whole = out.shape[1] // block[1]  # column blocks; in place, as this may be the largest matrix of the model
    if whole:
        out[:, : whole * block[1]].unflatten(1, (whole, block[1])).mul_(by_row[:, :whole, None])
    out[:, whole * block[1] :].mul_(by_row[:, -1:])
    return out


class Checkpoint:
    """The tensors of MLAModel, made one by one from a model folder.

    Raises UnsupportedModelError from the constructor if a file is missing or unreadable, or if the tensors are not
    exactly those the config asks for.
    """

    def __init__(self, folder: str | Path, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.config, self.device, self.dtype = config, device, dtype
        self.on_read: Callable[[int], object] = lambda num_bytes: None
        """Told the size of each published tensor after it was copied; the sizes add up to `num_bytes`."""
        self._folder = ModelFolder(folder)
        self._weights = sanitize(self._folder.tensors, config)
        self.num_bytes = sum(self._size(s) for weight in self._weights.values() for s in weight.sources)

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def read(self, name: str) -> Tensor:
        """The model's tensor `name` on the target device, in the target dtype or, where it must be, in float32."""
        weight = self._weights[name]
        ours = torch.empty(weight.shape, device=self.device, dtype=torch.float32 if weight.float32 else self.dtype)
        for source in weight.sources:
            source.copy(ours, self._values(source))
            self.on_read(self._size(source))
        return ours

    def _values(self, source: Source) -> Tensor:
        theirs = self._folder.read(source.name)
        if source.expert is not None:
            theirs = theirs[source.expert]
        theirs = theirs.to(self.device)  # float8 is scaled there; on the CPU this is the mapped file itself
        if self._folder.tensors[source.name].dtype not in FLOAT8:
            return theirs
        scale = self._folder.read(source.name + SCALE)
        if source.expert is not None:
            scale = scale[source.expert]
        assert self.config.weight_block_size is not None
        return scale_blocks(theirs, scale.to(self.device), self.config.weight_block_size)

    def _size(self, source: Source) -> int:
        info = self._folder.tensors[source.name]
        return info.num_bytes if source.expert is None else info.num_bytes // info.shape[0]


def memory_bytes(config: ModelConfig, itemsize: int) -> int:
    """Bytes of the model's tensors in memory with `itemsize` bytes an element; the router's stay float32."""
    shapes = expected_shapes(config, stacked=set(range(config.num_layers)))  # every element has one place in memory
    return sum(prod(shape) * (4 if ".mlp.gate." in name else itemsize) for name, shape in shapes.items())


def _stacked_layers(tensors: Mapping[str, TensorInfo], config: ModelConfig) -> set[int]:
    return {i for i in range(config.num_layers) if f"model.layers.{i}.mlp.experts.gate_up_proj" in tensors}


def _check_tensor(
    name: str, info: TensorInfo, shape: Shape, tensors: Mapping[str, TensorInfo], config: ModelConfig
) -> list[str]:
    """Problems of one tensor that belongs to the model."""
    if info.shape != shape:
        return [f"{name} is {list(info.shape)}, must be {list(shape)}"]
    if info.dtype not in FLOATS:
        return [f"{name} is {info.dtype}; understood: {', '.join(FLOATS)}"]
    scale, block = tensors.get(name + SCALE), config.weight_block_size
    if info.dtype not in FLOAT8:
        return [] if scale is None else [f"unexpected {name + SCALE} {list(scale.shape)}: {name} is {info.dtype}"]
    if block is None:
        return [f"{name} is {info.dtype}, but config.json has no quantization_config.weight_block_size"]
    if len(shape) < 2:
        return [f"{name} is {info.dtype}; only matrices may be"]
    blocks = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    if scale is None:
        return [f"missing {name + SCALE} {list(blocks)}"]
    return [] if scale.shape == blocks else [f"{name + SCALE} is {list(scale.shape)}, must be {list(blocks)}"]


def _is_unused(name: str, config: ModelConfig) -> bool:
    """Layers of the multi-token prediction heads, a tied head, and the frequencies that old checkpoints carry."""
    layers = range(config.num_layers, config.num_layers + config.num_nextn_predict_layers)
    prediction = any(name.startswith(f"model.layers.{layer}.") for layer in layers)
    tied = name == "lm_head.weight" and config.tie_word_embeddings
    return prediction or tied or name.endswith(".rotary_emb.inv_freq")
