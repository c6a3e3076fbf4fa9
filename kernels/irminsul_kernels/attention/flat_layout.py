"""A batch as the GPU kernels read it: flat int32 vectors on the device, and the kernel that computes each query.

Queries that are alone in their sequence go to decode, short extends to the absorbed form, long ones to the expanded
form. That depends on the model's shapes, so the plans are made at the first layer and kept for the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from irminsul_kernels.attention.plans import ExpandedPlan, ExtendPlan, plan_expanded, plan_extend
from irminsul_kernels.device import upload

Span = tuple[int, int, np.ndarray]
"""(first query, first slot, positions of the queries) of a sequence."""


@dataclass(frozen=True)
class Plans:
    """Queries of the absorbed forms are numbered anew: the `singles` ones of decode, then those of `extend`."""

    absorbed: Tensor | None
    """int64: the number in the flat batch of each absorbed query; None where all are absorbed and in order."""
    num_absorbed: int
    absorbed_positions: Tensor
    """int32 [num_absorbed]"""
    singles: int
    kv_indptr: Tensor
    """int32 [singles + 1]"""
    max_length: int
    """Keys of the longest single."""
    extend: ExtendPlan
    expanded: ExpandedPlan


@dataclass(frozen=True)
class FlatLayout:
    """Made by :func:`build_flat_layout`."""

    slots: Tensor
    """int32 [all keys]; the sequences with one query come first, in order."""
    base: Tensor
    """int32 [capacity]"""
    turns: Tensor
    """int64 [d/2]"""
    q_positions: Tensor
    """int32 [T]"""
    singles: list[Span]
    others: list[Span]
    num_queries: int
    _plans: dict[tuple[int, ...], Plans] = field(default_factory=dict)

    def plans(self, heads: int, threshold: int, chunk: int, decodes: bool, multiprocessors: Callable[[], int]) -> Plans:
        """The plans for a model's shapes, made at the first call.

        Args:
            threshold: number of queries from which a sequence is computed in the expanded form.
            chunk: keys expanded at a time.
            decodes: whether the decode kernel has a configuration for these rows; if not, extend serves singles too.
            multiprocessors: of the device.
        """
        key = (heads, threshold, chunk, decodes)
        if key not in self._plans:
            self._plans[key] = self._make_plans(heads, threshold, chunk, decodes, multiprocessors())
        return self._plans[key]

    def _make_plans(self, heads: int, threshold: int, chunk: int, decodes: bool, multiprocessors: int) -> Plans:
        device = self.slots.device
        singles = self.singles if decodes else []
        rest = self.others if decodes else self.singles + self.others
        short = [span for span in rest if len(span[2]) < threshold]
        long = [span for span in rest if len(span[2]) >= threshold]
        absorbed = singles + short
        numbers = [np.arange(first, first + len(positions)) for first, _, positions in absorbed]
        order = np.concatenate(numbers) if numbers else np.empty(0, np.int64)
        positions = np.concatenate([span[2] for span in absorbed]) if absorbed else np.empty(0, np.int64)
        renumbered, at = [], len(singles)
        for _, first_slot, span_positions in short:
            renumbered.append((at, first_slot, span_positions))
            at += len(span_positions)
        lengths = [int(span[2][-1]) + 1 for span in singles]
        whole = len(order) == self.num_queries and bool((order == np.arange(len(order))).all())
        return Plans(
            absorbed=None if whole else upload(order, np.int64, device),
            num_absorbed=len(order),
            absorbed_positions=upload(positions, np.int32, device),
            singles=len(singles),
            kv_indptr=upload(np.cumsum([0, *lengths]), np.int32, device),
            max_length=max(lengths, default=0),
            extend=plan_extend(renumbered, len(order), heads, device, multiprocessors),
            expanded=plan_expanded(long, self.num_queries, chunk, device),
        )


def build_flat_layout(
    slots: list[np.ndarray],
    base: np.ndarray | Tensor,
    q_positions: list[np.ndarray],
    turns: Tensor,
    device: torch.device | str,
) -> FlatLayout:
    """Put a checked batch on the device; arguments as in `build_layout`, except that `base` may lie there already."""
    starts = np.cumsum([0, *map(len, q_positions)])
    order = sorted(range(len(slots)), key=lambda i: len(q_positions[i]) > 1)
    spans: tuple[list[Span], list[Span]] = ([], [])
    flat, at = [], 0
    for i in order:
        positions = q_positions[i].astype(np.int64)
        length = int(positions[-1]) + 1
        spans[len(positions) > 1].append((int(starts[i]), at, positions))
        flat.append(slots[i][:length])
        at += length
    everything = np.concatenate(flat) if flat else np.empty(0, np.int32)
    q_all = np.concatenate(q_positions) if q_positions else np.empty(0, np.int64)
    return FlatLayout(
        slots=upload(everything, np.int32, device),
        base=base if isinstance(base, Tensor) else upload(base, np.int32, device),
        turns=turns.to(device),
        q_positions=upload(q_all, np.int32, device),
        singles=spans[0],
        others=spans[1],
        num_queries=int(starts[-1]),
    )
