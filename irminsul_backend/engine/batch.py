"""The scheduled tokens of a step, as host arrays and as tensors on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Piece:
    """The scheduled tokens of one sequence in a step: prompt holes, or one decode token."""

    token_ids: np.ndarray
    """int32 [q]"""
    positions: np.ndarray
    """int64 [q], ascending"""
    slots: np.ndarray
    """int32 [positions[-1] + 1 or more], by position; earlier rows that are not computed here are written already"""
    wants_logits: bool
    """Whether the last token's logits are needed."""


def pinned(array: np.ndarray, device: torch.device) -> Tensor:
    """Make a host tensor to copy from; for a GPU in pinned memory, which torch keeps until the copy is done."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory() if device.type == "cuda" else tensor


def upload_together(arrays: Sequence[np.ndarray], device: torch.device) -> tuple[Tensor, ...]:
    """Copy arrays to the device as int64 tensors, in one transfer."""
    packed = pinned(np.concatenate(arrays, dtype=np.int64), device).to(device, non_blocking=True)
    return tuple(torch.split(packed, [len(a) for a in arrays]))


def batch_buckets(most: int) -> list[int]:
    """Return the batch sizes that decode steps are padded to: 1, 2, 4, ... and `most`."""
    return [*(1 << i for i in range((most - 1).bit_length())), most]


def bucket_of(n: int, buckets: Sequence[int]) -> int | None:
    """Return the smallest of the ascending `buckets` that is at least n, or None."""
    return next((bucket for bucket in buckets if bucket >= n), None)


@dataclass(frozen=True)
class DecodeBuffer:
    """Layout of a decode step's inputs in one int32 buffer, for a batch padded to `bucket`.

    In order: kv_indptr [bucket + 1], token ids, positions and new slots [bucket each], and then, aligned to 4 elements
    (16 bytes, like the buffer itself), the slots of all sequences.
    """

    bucket: int

    @property
    def first_slot(self) -> int:
        """Offset of the sequences' slots, in elements."""
        return -(-(4 * self.bucket + 1) // 4) * 4

    def pack(self, pieces: Sequence[Piece], scratch: int) -> np.ndarray:
        """Return the buffer's contents, int32, without its unused end.

        Padding computes token 0 at position 0 of an empty sequence; its rows go to slot `scratch`, which no sequence
        holds.
        """
        n = len(pieces)
        lengths = [int(piece.positions[0]) + 1 for piece in pieces]
        buffer = np.zeros(self.first_slot + sum(lengths), np.int32)
        kv_indptr, token_ids, positions, new_slots, slots = self.views(buffer)
        kv_indptr[1:] = sum(lengths)
        kv_indptr[1 : n + 1] = np.cumsum(lengths)
        token_ids[:n] = [piece.token_ids[0] for piece in pieces]
        positions[:n] = [length - 1 for length in lengths]
        new_slots[:] = scratch
        new_slots[:n] = [piece.slots[length - 1] for piece, length in zip(pieces, lengths, strict=True)]
        if pieces:
            np.concatenate([p.slots[:length] for p, length in zip(pieces, lengths, strict=True)], out=slots)
        return buffer

    def views(self, buffer: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Split an array or a tensor into kv_indptr, token_ids, positions, new_slots and slots (the rest)."""
        b = self.bucket
        starts = [0, b + 1, 2 * b + 1, 3 * b + 1, 4 * b + 1]
        parts = [buffer[start:end] for start, end in pairwise(starts)]
        return parts[0], parts[1], parts[2], parts[3], buffer[self.first_slot :]
