"""The rows of all sequences, and one forward pass over a batch of pieces of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import psutil
import torch
from irminsul_kernels import AttentionLayout, build_layout, mla_attention
from torch import Tensor

from irminsul_backend.config import ServerConfig
from irminsul_backend.errors import ServerStartError
from irminsul_backend.model import MLAModel


@dataclass(frozen=True)
class Piece:
    """Tokens of one sequence to compute in this pass: prompt holes or one decode token."""

    token_ids: np.ndarray
    """int32 [q]"""
    positions: np.ndarray
    """int64 [q], ascending"""
    slots: np.ndarray
    """int32, at least positions[-1] + 1; the rows before it that are not computed here are written already"""
    wants_logits: bool
    """Whether the last token's logits are needed."""


class _PoolContext:
    """AttentionContext over the pool: writes the batch's rows, then attends. Rows written earlier are only read."""

    def __init__(self, rows: Tensor, new_slots: Tensor, layout: AttentionLayout, scale: float) -> None:
        self._rows, self._new_slots, self._layout, self._scale = rows, new_slots, layout, scale

    def attend(self, layer: int, q_nope: Tensor, q_rope: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        pool = self._rows[layer]
        pool.index_copy_(0, self._new_slots, rows)
        return mla_attention(q_nope, q_rope, pool, self._layout, w_uk, w_uv, self._scale)


SMALL_STEP_TOKENS, SMALL_STEP_KEYS = 8, 4096
"""A step within both runs on one CPU thread: sharing out operations this small costs more than it saves (3.7 against
5.4 ms for one token of the shipped model on two cores), and a core stays free for the server's other processes."""


class ModelRunner:
    """Owns the row pool, [layers, capacity, R + d] in the model's dtype. Touches no bookkeeping."""

    def __init__(self, model: MLAModel, capacity: int) -> None:
        self.model = model
        self._threads = torch.get_num_threads()
        config = model.config
        # zeros, not empty: the memory is taken now, not under load
        self.rows = torch.zeros(config.num_layers, capacity, config.row_size, dtype=model.dtype, device=model.device)

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece], base: np.ndarray) -> Tensor:
        """Compute every token of every piece in one pass and write their rows.

        Args:
            base: int32 [capacity], base position of each slot.

        Returns:
            float32 [number of pieces that want logits, vocab].
        """
        device = self.model.device
        config = self.model.config
        small = (
            sum(len(p.positions) for p in pieces) <= SMALL_STEP_TOKENS
            and sum(int(p.positions[-1]) for p in pieces) <= SMALL_STEP_KEYS
        )
        torch.set_num_threads(1 if small else self._threads)
        positions = np.concatenate([p.positions for p in pieces])
        token_ids = np.concatenate([p.token_ids for p in pieces])
        new_slots = np.concatenate([p.slots[p.positions] for p in pieces])
        layout = build_layout(
            [p.slots for p in pieces], base, [p.positions for p in pieces], config.rope.turns, device=device
        )
        context = _PoolContext(
            self.rows, torch.from_numpy(new_slots.astype(np.int64)).to(device), layout, config.softmax_scale
        )
        hidden = self.model.forward(
            torch.from_numpy(token_ids.astype(np.int64)).to(device), torch.from_numpy(positions).to(device), context
        )
        ends = np.cumsum([len(p.positions) for p in pieces]) - 1
        wanted = torch.from_numpy(ends[[p.wants_logits for p in pieces]]).to(device)
        return self.model.compute_logits(hidden[wanted])


def resolve_device(config: ServerConfig) -> tuple[str, torch.dtype]:
    """Device and dtype that `auto` means here."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ServerStartError(f"device is {device!r} but torch {torch.__version__} sees no GPU; use --device cpu")
    dtypes = {
        "auto": torch.float32 if device == "cpu" else torch.bfloat16,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
    }
    if config.dtype not in dtypes:
        raise ServerStartError(f"dtype is {config.dtype!r}; it must be one of {', '.join(dtypes)}")
    return device, dtypes[config.dtype]


def resolve_capacity(config: ServerConfig, model: MLAModel) -> int:
    """Slots in the pool: as configured, or an eighth of the free memory (CPU), four fifths of it (GPU); checked to fit.

    Raises:
        ServerStartError: the pool does not fit, with both sizes.
    """
    row_bytes = model.config.num_layers * model.config.row_size * torch.empty(0, dtype=model.dtype).element_size()
    on_gpu = model.device.type == "cuda"
    available = torch.cuda.mem_get_info(model.device)[0] if on_gpu else psutil.virtual_memory().available
    if config.capacity_tokens == 0:
        fits = int(available * 0.8 if on_gpu else available / 8) // row_bytes
        return max(1024, fits if on_gpu else min(fits, 131072))
    if config.capacity_tokens * row_bytes > available:
        raise ServerStartError(
            f"capacity_tokens {config.capacity_tokens} takes {config.capacity_tokens * row_bytes / 2**30:.1f} GiB "
            f"({row_bytes} bytes a token) and {available / 2**30:.1f} GiB are free; "
            f"use at most {available // row_bytes} or 0 (automatic)"
        )
    return config.capacity_tokens
