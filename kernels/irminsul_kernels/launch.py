"""Launch configuration of a kernel, shared by its wrapper, the ahead-of-time compiler and the benchmark."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class KernelConfig:
    """One kernel with its argument types and launch parameters.

    Arguments that are not in `signature` are constexpr and must be in `constexprs`.
    """

    name: str
    """Description: "decode, 16 heads, 512 + 64, bf16"."""
    kernel: Any
    """The @triton.jit function."""
    signature: dict[str, str]
    """Triton type of each argument: "*bf16", "*i32", "i32", "fp32"."""
    constexprs: dict[str, Any]
    num_warps: int
    num_stages: int
    aligned: tuple[str, ...] = ()
    """Arguments (pointers, strides) that are multiples of 16; Triton finds this out by itself at a launch."""
    unrotated: dict[str, Any] = field(default_factory=dict)
    """Constexprs that switch the rotation off; empty if the kernel does not rotate."""
