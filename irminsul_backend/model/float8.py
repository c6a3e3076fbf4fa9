"""float8 weights with one scale per block, as DeepSeek-V3 is published: value = weight * scale of its block."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from irminsul_backend.hub.config_fields import MAX_SIZE, FieldReader
from irminsul_backend.hub.weight_files import FLOAT8, TensorInfo

SCALE = "_scale_inv"
"""Suffix of the tensor that holds a weight's block scales."""

Block = tuple[int, int]
"""Rows and columns of a block."""


def read_block_size(read: FieldReader) -> Block | None:
    """Read quantization_config.weight_block_size; None where the model has no quantization_config."""
    quantization = read.value("quantization_config")
    if quantization is None:
        return None
    if not isinstance(quantization, Mapping):
        read.refuse("quantization_config", "it must be an object or null")
        return None
    inner = FieldReader(quantization, "quantization_config.", read.problems)
    inner.choice("quant_method", ("fp8",))
    block = quantization.get("weight_block_size")
    if (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and 0 < size <= MAX_SIZE for size in block)
    ):
        return block[0], block[1]
    if not inner.bad:
        inner.refuse("weight_block_size", "it must be two sizes, such as [128, 128]")
    return None


def find_scale_problems(name: str, tensors: Mapping[str, TensorInfo], block: Block | None) -> list[str]:
    """Return what keeps tensor `name` from being scaled: every float8 matrix has one scale per block, others none."""
    info, scale = tensors[name], tensors.get(name + SCALE)
    if info.dtype not in FLOAT8:
        return [] if scale is None else [f"unexpected {name + SCALE} {list(scale.shape)}: {name} is {info.dtype}"]
    if block is None:
        return [f"{name} is {info.dtype}, but config.json has no quantization_config.weight_block_size"]
    shape = info.shape
    if len(shape) < 2:
        return [f"{name} is {info.dtype}; only matrices may be"]
    blocks = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    if scale is None:
        return [f"missing {name + SCALE} {list(blocks)}"]
    return [] if scale.shape == blocks else [f"{name + SCALE} is {list(scale.shape)}, must be {list(blocks)}"]


def scale_blocks(weight: Tensor, scale: Tensor, block: Block) -> Tensor:
    """Return float32 [m, n] = float8 `weight` [m, n] * `scale` [ceil(m / b0), ceil(n / b1)] of the element's block."""
    out = weight.float()
    by_row = scale.float().repeat_interleave(block[0], 0)[: out.shape[0]]
    whole = out.shape[1] // block[1]  # column blocks; in place, as this may be the largest matrix of the model
    if whole:
        columns = whole * block[1]
        out[:, :columns].view(out.shape[0], whole, block[1]).mul_(by_row[:, :whole, None])
    out[:, whole * block[1] :].mul_(by_row[:, -1:])
    return out
