"""Argument checks of the kernels' wrappers. Needs no Triton."""

from __future__ import annotations

import torch
from torch import Tensor

Wanted = tuple[str, Tensor | None, torch.dtype | tuple[torch.dtype, ...], tuple[int, ...]]
"""Name, tensor (None: not given, nothing to check), dtype or dtypes that are allowed, shape."""


def sizes(name: str, x: Tensor, *dimensions: str) -> tuple[int, ...]:
    """The shape of `x`, which must have the named dimensions.

    Raises:
        ValueError: it has another number of dimensions.
    """
    if x.dim() != len(dimensions):
        raise ValueError(f"{name} is {tuple(x.shape)}; it must be [{', '.join(dimensions)}]")
    return tuple(x.shape)


def check_tensors(device: torch.device, *wanted: Wanted) -> None:
    """Check that every tensor has its shape and dtype, is contiguous and is on `device`, where the rows are.

    Raises:
        ValueError: a tensor does not; the message names the first one, what it is and what it must be.
    """
    for name, tensor, dtypes, shape in wanted:
        if tensor is None:
            continue
        dtypes = dtypes if isinstance(dtypes, tuple) else (dtypes,)
        if tensor.dtype not in dtypes or tensor.shape != shape:
            allowed = " or ".join(map(str, dtypes))
            raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}; it must be {allowed} {shape}")
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}, rows on {device}; all must be on one device")
        if not tensor.is_contiguous():
            raise ValueError(f"{name} has strides {tensor.stride()}; make it contiguous")


def check_slots(slots: Tensor, kv_indptr: Tensor, capacity: int, max_length: int) -> None:
    """Check the values of a batch's slots and lengths. For tensors on a GPU this waits for the GPU.

    Args:
        slots: int32 [sum of lengths or more].
        kv_indptr: int32 [B + 1].
        capacity: rows of the pool.
        max_length: upper bound of the sequence lengths.

    Raises:
        ValueError: a negative length, one above max_length, more rows than slots, a slot outside the pool.
    """
    indptr = kv_indptr.cpu()
    lengths = indptr.diff()
    if indptr[0] < 0 or (lengths < 0).any():
        raise ValueError(f"kv_indptr must ascend from 0 or more, not {indptr.tolist()[:9]}...")
    if len(lengths) and lengths.max() > max_length:
        raise ValueError(f"kv_indptr has a sequence of {lengths.max()} rows; max_length is {max_length}")
    if indptr[-1] > len(slots):
        raise ValueError(f"kv_indptr ends at {indptr[-1]}; slots holds {len(slots)}")
    used = slots[int(indptr[0]) : int(indptr[-1])]
    if len(used) and not 0 <= int(used.min()) <= int(used.max()) < capacity:
        raise ValueError(f"slots {int(used.min())}..{int(used.max())} leave the pool of {capacity}")
