"""mla_attention by the kernels, all of them in one batch, against its torch path in float32 on the same rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from irminsul_kernels import build_layout, expanded_threshold, mla_attention, turns_per_position

pytest.importorskip("triton")

HEADS, RANK, ROPE, NOPE, VALUE, CAPACITY = 2, 32, 32, 16, 16, 512


class Scene:
    """A shared run of slots at the start of every sequence, moved; then rows of its own. Unused rows are NaN."""

    def __init__(self, queries: list[np.ndarray], rank: int = RANK) -> None:
        g, rng = torch.Generator().manual_seed(4), np.random.default_rng(4)
        self.queries = queries
        self.turns = turns_per_position(10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE))
        order = rng.permutation(CAPACITY).astype(np.int32)
        self.base = np.full(CAPACITY, 2**30, np.int32)
        self.base[order[:20]] = np.arange(5000, 5020)
        self.slots, used = [], 20
        for positions in queries:
            n = int(positions[-1]) + 1
            shared = min(20, n // 2)
            own = order[used : used + n - shared]
            used += len(own)
            self.base[own] = np.arange(shared, n)
            self.slots.append(np.concatenate((order[:shared], own)))
        self.rows = torch.full((CAPACITY, rank + ROPE), float("nan"))
        self.rows[torch.from_numpy(order[:used])] = torch.randn(used, rank + ROPE, generator=g)
        tokens = sum(map(len, queries))
        self.q_nope = torch.randn(tokens, HEADS, NOPE, generator=g)
        self.q_rope = torch.randn(tokens, HEADS, ROPE, generator=g)
        self.w_uk = torch.randn(HEADS, NOPE, rank, generator=g) * rank**-0.5
        self.w_uv = torch.randn(HEADS, rank, VALUE, generator=g) * rank**-0.5

    def run(self, kernels: bool, dtype: torch.dtype) -> torch.Tensor:
        """Both paths start from the numbers as bf16 stores them."""
        layout = build_layout(self.slots, self.base, self.queries, self.turns, kernels=kernels)
        q_nope, q_rope, rows, w_uk, w_uv = (
            x.bfloat16().to(dtype) for x in (self.q_nope, self.q_rope, self.rows, self.w_uk, self.w_uv)
        )
        out = mla_attention(q_nope, q_rope, rows, layout, w_uk, w_uv, (NOPE + ROPE) ** -0.5)
        again = mla_attention(q_nope, q_rope, rows, layout, w_uk, w_uv, (NOPE + ROPE) ** -0.5)
        assert out.dtype == dtype and out.is_contiguous() and torch.equal(out, again)
        return out

    def error(self) -> float:
        exact = self.run(False, torch.float32)
        return ((self.run(True, torch.bfloat16).float() - exact).norm() / exact.norm()).item()


@pytest.mark.interpreter
class TestAgainstTorch:
    """Queries, weights and outputs are rounded to bf16 between the kernels: three roundings of 1.7e-3 each."""

    def test_decode_extend_and_expanded_in_one_batch(self) -> None:
        threshold = expanded_threshold(RANK, NOPE, VALUE)
        long = np.arange(10, 10 + threshold)
        queries = [np.array([3, 9, 40]), np.array([50]), long, np.array([0]), np.array([7, 8])]
        assert Scene(queries).error() < 5e-3

    def test_decode_alone(self) -> None:
        assert Scene([np.array([n]) for n in (30, 0, 64)]).error() < 5e-3

    def test_extend_alone(self) -> None:
        assert Scene([np.array([3, 30]), np.array([0, 1])]).error() < 5e-3

    def test_expanded_alone(self) -> None:
        assert Scene([np.arange(expanded_threshold(RANK, NOPE, VALUE))]).error() < 5e-3

    def test_rows_that_decode_cannot_take_go_to_extend(self) -> None:
        assert Scene([np.array([30]), np.array([3, 4])], rank=48).error() < 5e-3


def test_wide_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="float32; the kernels take"):
        Scene([np.array([3])]).run(True, torch.float32)


def test_a_wrong_batch_is_refused_before_it_is_uploaded() -> None:
    scene = Scene([np.array([3])])
    with pytest.raises(ValueError, match="leave the pool"):
        build_layout([scene.slots[0] + CAPACITY], scene.base, scene.queries, scene.turns, kernels=True)
