"""Checkpoint: the model's tensors, made one by one from the published tensors of a model folder.

A family's file says which published tensors fill each of the model's (:class:`Weight`). Each is allocated once, at its
final size, and every published tensor is copied into its place, so a layer never exists twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from irminsul_backend.hub.weight_files import FLOAT8, FLOATS, ModelFolder, TensorInfo
from irminsul_backend.model.float8 import SCALE, Block, find_scale_problems, scale_blocks

Shape = tuple[int, ...]


class Source(NamedTuple):
    """A published tensor that fills (a part of) one of the model's."""

    name: str
    copy: Callable[[Tensor, Tensor], object]
    """Copies (into the model's tensor, from the published one); the dtype may change on the way."""
    expert: int | None = None
    """Only this entry of a stacked tensor is meant."""


class Weight(NamedTuple):
    """One tensor of the model in memory."""

    shape: Shape
    sources: tuple[Source, ...]
    float32: bool = False
    """Kept in float32 whatever the model's dtype: the router's, whose rounding would change the choice of experts."""


class TensorSource(Protocol):
    """Where layers take their tensors from."""

    device: torch.device
    dtype: torch.dtype

    def read(self, name: str) -> Tensor:
        """Return the model's tensor `name` on `device`, in `dtype` or, where it must be, in float32."""
        ...


class Checkpoint:
    """A TensorSource over a model folder whose tensors were checked with :func:`find_problems`."""

    def __init__(
        self,
        files: ModelFolder,
        weights: Mapping[str, Weight],
        block: Block | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """`weights` are the model's tensors by name; `block` is the block shape of float8 weights."""
        self.device, self.dtype = device, dtype
        self.on_read: Callable[[int], object] = lambda num_bytes: None
        """Called with the size of each published tensor after it was copied; the sizes add up to `num_bytes`."""
        self._files, self._weights, self._block = files, weights, block
        self.num_bytes = sum(self._size(source) for weight in weights.values() for source in weight.sources)

    def read(self, name: str) -> Tensor:
        """Return the model's tensor `name` on `device`, in `dtype` or, where it must be, in float32."""
        weight = self._weights[name]
        ours = torch.empty(weight.shape, device=self.device, dtype=torch.float32 if weight.float32 else self.dtype)
        for source in weight.sources:
            source.copy(ours, self._values(source))
            self.on_read(self._size(source))
        return ours

    def _values(self, source: Source) -> Tensor:
        theirs = self._files.read(source.name)
        if source.expert is not None:
            theirs = theirs[source.expert]
        theirs = theirs.to(self.device)  # float8 is scaled there; on the CPU this is the mapped file itself
        if self._files.tensors[source.name].dtype not in FLOAT8:
            return theirs
        scale = self._files.read(source.name + SCALE)
        if source.expert is not None:
            scale = scale[source.expert]
        assert self._block is not None
        return scale_blocks(theirs, scale.to(self.device), self._block)

    def _size(self, source: Source) -> int:
        info = self._files.tensors[source.name]
        return info.num_bytes if source.expert is None else info.num_bytes // info.shape[0]


def find_problems(
    tensors: Mapping[str, TensorInfo],
    expected: Mapping[str, Shape],
    is_unused: Callable[[str], bool],
    block: Block | None,
) -> list[str]:
    """Return what is wrong with a checkpoint: tensors missing, unexpected, wrongly shaped or of another dtype.

    Args:
        tensors: what the files' headers say, by published name.
        expected: the shape of every tensor that the model needs, by published name.
        is_unused: whether a tensor beyond these, by name, is known and left out.
        block: block shape of float8 weights; None = there are none.
    """
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in tensors]
    for name, info in tensors.items():
        if name not in expected:
            is_scale = name.endswith(SCALE) and name.removesuffix(SCALE) in expected
            if not is_scale and not is_unused(name):
                problems.append(f"unexpected {name} {list(info.shape)}")
        elif info.shape != expected[name]:
            problems.append(f"{name} is {list(info.shape)}, must be {list(expected[name])}")
        elif info.dtype not in FLOATS:
            problems.append(f"{name} is {info.dtype}; understood: {', '.join(FLOATS)}")
        else:
            problems += find_scale_problems(name, tensors, block)
    return problems
