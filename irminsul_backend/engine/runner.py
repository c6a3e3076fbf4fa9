"""The model runner: the row pool, and one forward pass over the scheduled tokens of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from irminsul_kernels import AttentionLayout, build_layout, mla_attention
from irminsul_kernels.attention.mla_attention import KERNEL_ARCHITECTURES
from torch import Tensor

from irminsul_backend.engine.batch import Piece, upload_together
from irminsul_backend.model import MLAModel

__all__ = ["ModelRunner", "Piece"]


class _PoolContext:
    """AttentionContext over the pool: writes the batch's rows, then attends. Rows written earlier are only read."""

    def __init__(self, rows: Tensor, new_slots: Tensor, layout: AttentionLayout, scale: float) -> None:
        self._rows, self._new_slots, self._layout, self._scale = rows, new_slots, layout, scale

    def attend(self, layer: int, q_nope: Tensor, q_rope: Tensor, rows: Tensor, w_uk: Tensor, w_uv: Tensor) -> Tensor:
        pool = self._rows[layer]
        pool.index_copy_(0, self._new_slots, rows)
        return mla_attention(q_nope, q_rope, pool, self._layout, w_uk, w_uv, self._scale)


SMALL_STEP_TOKENS, SMALL_STEP_KEYS = 8, 4096
"""Scheduled tokens and keys up to which a step runs on one CPU thread: parallelising operations this small costs more
than it saves (3.7 against 5.4 ms for one token of the shipped model on two cores), and a core stays free for the
server's other processes."""


def has_kernels(model: MLAModel) -> bool:
    """Whether attention can use the Triton kernels: in bfloat16 or float16, on a GPU that they were written for."""
    return (
        model.device.type == "cuda"
        and model.dtype in (torch.bfloat16, torch.float16)
        and torch.cuda.get_device_capability(model.device) in KERNEL_ARCHITECTURES
    )


class ModelRunner:
    """Runs the model on the row pool, [layers, slots, R + d] in the model's dtype, which it owns.

    The cache does the bookkeeping. With kernels, a copy of the base positions is kept on the device, updated by every
    step for its new rows, and the pool has one slot more than its capacity, for the rows of padding.
    """

    def __init__(
        self, model: MLAModel, capacity: int, *, max_running: int = 64, use_kernels: bool | None = None
    ) -> None:
        """Allocate the row pool.

        Args:
            capacity: number of slots.
            max_running: most sequences in a decode step.
            use_kernels: by default :func:`has_kernels`; on the CPU they need Triton's interpreter.
        """
        self.model = model
        self.enter_thread()
        self.use_kernels = has_kernels(model) if use_kernels is None else use_kernels
        self._threads = torch.get_num_threads()
        config, slots = model.config, capacity + self.use_kernels
        # zeros, not empty: the memory is taken now, not under load
        self.rows = torch.zeros(config.num_layers, slots, config.row_size, dtype=model.dtype, device=model.device)
        self._turns, self._base, self._decoder = config.rope.turns, None, None
        if self.use_kernels:
            from irminsul_kernels.attention.decode import supports

            from irminsul_backend.engine.decoder import Decoder

            self._turns = self._turns.to(model.device)
            self._base = torch.zeros(slots, dtype=torch.int32, device=model.device)
            if supports(config.num_heads, config.kv_lora_rank, config.qk_rope_head_dim, model.dtype):
                self._decoder = Decoder(model, self.rows, self._base, self._turns, max_running)

    def enter_thread(self) -> None:
        """Make the model's GPU the calling thread's current device, on which Triton launches kernels."""
        if self.model.device.index is not None and self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)

    def check_device(self) -> None:
        """Raise what CUDA reports, if it has failed: an error that sticks is reported by every later call."""
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)

    def warm_up(self) -> None:
        """Compile the kernels and capture the graphs that decode steps need."""
        if self._decoder is not None:
            self._decoder.warm_up()

    @torch.inference_mode()
    def forward(self, pieces: Sequence[Piece], base: np.ndarray) -> Tensor:
        """Compute every token of every piece in one pass and write their rows.

        Args:
            pieces: the scheduled tokens, one piece per sequence.
            base: int32 [capacity], base position of each slot.

        Returns:
            float32 [number of pieces that want logits, vocab], valid until the next call.
        """
        if self._decoder is not None and self._decoder.takes(pieces):
            return self._decoder.forward(pieces)
        device, config = self.model.device, self.model.config
        if device.type == "cpu":
            small = (
                sum(len(p.positions) for p in pieces) <= SMALL_STEP_TOKENS
                and sum(int(p.positions[-1]) for p in pieces) <= SMALL_STEP_KEYS
            )
            torch.set_num_threads(1 if small else self._threads)
        ends = np.cumsum([len(p.positions) for p in pieces]) - 1
        token_ids, positions, new_slots, wanted = upload_together(
            [
                np.concatenate([p.token_ids for p in pieces]),
                np.concatenate([p.positions for p in pieces]),
                np.concatenate([p.slots[p.positions] for p in pieces]),
                ends[[p.wants_logits for p in pieces]],
            ],
            device,
        )
        if self._base is not None:
            self._base.index_copy_(0, new_slots, positions.int())
        layout = build_layout(
            [p.slots for p in pieces],
            base,
            [p.positions for p in pieces],
            self._turns,
            device=device,
            kernels=self.use_kernels,
            device_base=self._base,
        )
        context = _PoolContext(self.rows, new_slots, layout, config.softmax_scale)
        hidden = self.model.forward(token_ids, positions, context)
        return self.model.compute_logits(hidden[wanted])
