"""Placement of a model: its device, its dtype, and the number of slots in its pool."""

from __future__ import annotations

import re

import numpy as np
import psutil
import torch

from irminsul_backend.config import ServerConfig
from irminsul_backend.engine.batch import Piece
from irminsul_backend.engine.runner import ModelRunner
from irminsul_backend.engine.sampler import Sampler, sample
from irminsul_backend.errors import ServerStartError
from irminsul_backend.hub.json_files import read_config
from irminsul_backend.model import MLAModel, parse_config
from irminsul_backend.model.loading import memory_bytes
from irminsul_backend.protocol import GenerationRequest
from irminsul_backend.request_spec import SamplingParams

LEAST_CAPACITY = 1024
"""Fewest slots that an automatic size gives; a GPU with room for fewer is refused."""
MOST_CAPACITY_CPU = 131072
LONGEST_TRIAL = 65536
"""Context length in keys at which the workspace is measured; beyond it the workspace no longer grows."""
GRAPH_BYTES = 512 * 2**20
"""Bytes reserved for the CUDA graphs of decode steps and their buffers, which are allocated after the pool."""
GIB = 2**30


def resolve_device(config: ServerConfig) -> tuple[str, torch.dtype]:
    """Return the device and the dtype to use, with `auto` resolved for this machine.

    Raises:
        ServerStartError: an unknown device or one that is not there, an unknown dtype, a memory fraction out of range.
    """
    device = config.device
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", device):
        raise ServerStartError(f"device is {device!r}; it must be auto, cpu, cuda or cuda:N")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ServerStartError(f"device is {device!r} but torch {torch.__version__} sees no GPU; use --device cpu")
    if not 0 < config.gpu_memory_fraction <= 1:
        raise ServerStartError(f"gpu_memory_fraction is {config.gpu_memory_fraction}; it must be over 0, at most 1")
    dtypes = {
        "auto": torch.float32 if device == "cpu" else torch.bfloat16,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if config.dtype not in dtypes:
        raise ServerStartError(f"dtype is {config.dtype!r}; it must be one of {', '.join(dtypes)}")
    return device, dtypes[config.dtype]


def check_weights_fit(config: ServerConfig, device: str, dtype: torch.dtype) -> None:
    """Check, before anything is loaded, that the model's tensors fit on the GPU. The CPU is not checked: it can page.

    Raises:
        ServerStartError: they do not fit; the message gives both sizes.
        UnsupportedModelError: config.json is missing or not understood.
    """
    if not device.startswith("cuda"):
        return
    size = memory_bytes(parse_config(read_config(config.model)), dtype.itemsize)
    free, total = torch.cuda.mem_get_info(device)
    refuse_weights(size, total, config.gpu_memory_fraction, total - free)


def refuse_weights(size: int, total: int, fraction: float, taken: int) -> None:
    """Raise ServerStartError if `size` bytes of weights do not fit; the other arguments as in :func:`gpu_capacity`."""
    room = max(0, int(total * fraction) - taken)
    if size > room:
        raise ServerStartError(
            f"the model's weights take {size / GIB:.1f} GiB and {room / GIB:.1f} GiB may be used: gpu_memory_fraction "
            f"{fraction} of {total / GIB:.1f} GiB, less {taken / GIB:.1f} GiB that other processes hold; use a larger "
            "GPU or a smaller model"
        )


def resolve_capacity(config: ServerConfig, model: MLAModel) -> int:
    """Return the number of slots in the pool: as configured if that fits, or else what fits.

    On a GPU the pool may take its memory times `gpu_memory_fraction`, less what is in use already (weights, other
    processes) and less the measured workspace of a step; on the CPU an eighth of the free memory.

    Raises:
        ServerStartError: the pool does not fit; the message gives both sizes.
    """
    row_bytes = model.config.num_layers * model.config.row_size * model.dtype.itemsize
    if model.device.type == "cuda":
        workspace = measure_workspace(model, config.max_batch_tokens, config.max_running)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(model.device)
        return gpu_capacity(
            config.capacity_tokens, row_bytes, total, config.gpu_memory_fraction, total - free, workspace + GRAPH_BYTES
        )
    available: int = psutil.virtual_memory().available
    if config.capacity_tokens == 0:
        return max(LEAST_CAPACITY, min(available // 8 // row_bytes, MOST_CAPACITY_CPU))
    if config.capacity_tokens * row_bytes > available:
        raise ServerStartError(
            f"capacity_tokens {config.capacity_tokens} takes {config.capacity_tokens * row_bytes / GIB:.1f} GiB "
            f"({row_bytes} bytes a token) and {available / GIB:.1f} GiB are free; "
            f"use at most {available // row_bytes} or 0 (automatic)"
        )
    return config.capacity_tokens


def gpu_capacity(wanted: int, row_bytes: int, total: int, fraction: float, taken: int, workspace: int) -> int:
    """Return the number of slots that fit on a GPU. Sizes are in bytes.

    Args:
        wanted: slots asked for; 0 = as many as fit.
        row_bytes: size of one slot.
        total: memory of the GPU.
        fraction: share of `total` that may be used.
        taken: memory in use by the weights and by other processes.
        workspace: memory that a step needs in addition.

    Raises:
        ServerStartError: the slots asked for, or LEAST_CAPACITY of them, do not fit.
    """
    room = int(total * fraction) - taken - workspace
    slots = wanted or max(LEAST_CAPACITY, room // row_bytes)
    if slots * row_bytes <= room:
        return slots
    fits = max(0, room // row_bytes)
    advice = f"use at most {fits} or 0 (automatic)" if fits >= LEAST_CAPACITY else "use a larger GPU or a smaller model"
    raise ServerStartError(
        f"{f'capacity_tokens {wanted}' if wanted else f'the least KV pool of {slots} tokens'} takes "
        f"{slots * row_bytes / GIB:.2f} GiB ({row_bytes} bytes a token) and {max(0, room) / GIB:.2f} GiB are left: "
        f"gpu_memory_fraction {fraction} of {total / GIB:.1f} GiB, less {taken / GIB:.1f} GiB taken (weights and other "
        f"processes) and {workspace / GIB:.2f} GiB of workspace; {advice}, raise gpu_memory_fraction, or lower "
        "max_batch_tokens"
    )


def trial_step(max_batch_tokens: int, max_running: int, longest: int, capacity: int) -> list[Piece]:
    """Make the step that needs the most memory: the end of a long prompt and decoding sequences, all with logits.

    Slots repeat, so a small pool is enough; the scheduled tokens have slots of their own.

    Args:
        longest: length of the longest sequence, in keys.
        capacity: number of slots in the pool, at least max_batch_tokens.
    """
    others = min(max_running, max_batch_tokens) - 1
    lengths = [max_batch_tokens - others] + [1] * others
    longest = max(longest, lengths[0])
    pieces, used = [], 0
    for tokens in lengths:
        slots = np.arange(longest, dtype=np.int32) % capacity
        slots[longest - tokens :] = np.arange(used, used + tokens)
        positions = np.arange(longest - tokens, longest)
        pieces.append(Piece(np.zeros(tokens, np.int32), positions, slots, True))
        used += tokens
    return pieces


def measure_workspace(model: MLAModel, max_batch_tokens: int, max_running: int) -> int:
    """Return the bytes of GPU memory that a step (forward pass and sampling) takes besides weights and pool."""
    capacity = max_batch_tokens
    pieces = trial_step(
        max_batch_tokens, max_running, min(LONGEST_TRIAL, model.config.max_position_embeddings), capacity
    )
    torch.cuda.empty_cache()
    runner = ModelRunner(model, capacity, max_running=1)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_reserved(model.device)
    logits = runner.forward(pieces, np.zeros(capacity, np.int32))
    request = GenerationRequest(key="", sampling=SamplingParams(temperature=1.0, top_p=0.5))
    samplers = [Sampler(request, np.zeros(1, np.int32), model.config.vocab_size) for _ in pieces]
    sample(torch.zeros_like(logits), samplers, True)
    workspace = torch.cuda.max_memory_reserved(model.device) - before
    del runner, logits
    torch.cuda.empty_cache()
    return workspace
