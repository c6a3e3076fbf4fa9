"""Properties of devices, and uploads to them. Needs no Triton."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor


@lru_cache
def architecture(device: torch.device | str) -> int:
    """Compute capability, 90 for 9.0; on the CPU that of an H200, for the interpreter."""
    if torch.device(device).type != "cuda":
        return 90
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Number of the device's multiprocessors; on the CPU that of an H200, for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def upload(table: np.ndarray, dtype: type, device: torch.device | str) -> Tensor:
    """`table` as a tensor of `dtype` on `device`, copied from pinned memory so that the host does not wait."""
    tensor = torch.from_numpy(np.ascontiguousarray(table, dtype=dtype))
    if torch.device(device).type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
