"""mla_attention by the kernels, all of them in one batch, against its torch path in float32 on the same rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from irminsul_kernels import build_layout, expanded_threshold, mla_attention, turns_per_position

pytest.importorskip("triton")

RANK, ROPE, NOPE, VALUE = 32, 32, 16, 16


class Scene:
    """A shared run of slots at the start of every sequence, moved; then rows of its own. Unused rows are NaN."""

    def __init__(
        self,
        queries: list[np.ndarray],
        sizes: tuple[int, int, int, int] = (RANK, ROPE, NOPE, VALUE),
        heads: int = 2,
        device: str = "cpu",
    ) -> None:
        rank, rope, nope, value = sizes
        g, rng = torch.Generator().manual_seed(4), np.random.default_rng(4)
        self.queries, self.device = queries, device
        self.turns = turns_per_position(10000.0 ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope))
        capacity = 20 + sum(int(positions[-1]) + 1 for positions in queries) + 50
        order = rng.permutation(capacity).astype(np.int32)
        self.base = np.full(capacity, 2**30, np.int32)
        self.base[order[:20]] = np.arange(5000, 5020)
        self.slots, used = [], 20
        for positions in queries:
            n = int(positions[-1]) + 1
            shared = min(20, n // 2)
            own = order[used : used + n - shared]
            used += len(own)
            self.base[own] = np.arange(shared, n)
            self.slots.append(np.concatenate((order[:shared], own)))
        self.rows = torch.full((capacity, rank + rope), float("nan"))
        self.rows[torch.from_numpy(order[:used])] = torch.randn(used, rank + rope, generator=g)
        tokens = sum(map(len, queries))
        self.q_nope = torch.randn(tokens, heads, nope, generator=g)
        self.q_rope = torch.randn(tokens, heads, rope, generator=g)
        self.w_uk = torch.randn(heads, nope, rank, generator=g) * rank**-0.5
        self.w_uv = torch.randn(heads, rank, value, generator=g) * rank**-0.5
        self.scale = (nope + rope) ** -0.5

    def run(self, kernels: bool, dtype: torch.dtype, device: str) -> torch.Tensor:
        """Both paths start from the numbers as bf16 stores them."""
        layout = build_layout(self.slots, self.base, self.queries, self.turns, device=device, kernels=kernels)
        q_nope, q_rope, rows, w_uk, w_uv = (
            x.bfloat16().to(device, dtype) for x in (self.q_nope, self.q_rope, self.rows, self.w_uk, self.w_uv)
        )
        out = mla_attention(q_nope, q_rope, rows, layout, w_uk, w_uv, self.scale)
        # the next layer: the plans are there
        again = mla_attention(q_nope, q_rope, rows, layout, w_uk, w_uv, self.scale)
        assert out.dtype == dtype and out.is_contiguous() and torch.equal(out, again)
        return out.cpu()

    def error(self) -> float:
        exact = self.run(False, torch.float32, "cpu")
        return ((self.run(True, torch.bfloat16, self.device).float() - exact).norm() / exact.norm()).item()


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
        assert Scene([np.array([30]), np.array([3, 4])], (48, ROPE, NOPE, VALUE)).error() < 5e-3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU")
@pytest.mark.parametrize("heads", [8, 16, 128])
def test_published_shapes_on_a_gpu(heads: int) -> None:
    rng = np.random.default_rng(6)
    holes = [np.sort(rng.choice(3000, n, replace=False)) for n in (40, 170, 900)]
    queries = [np.array([2999]), *holes, np.array([64]), np.arange(700), np.arange(2000, 2004)]
    assert Scene(queries, (512, 64, 128, 128), heads, "cuda").error() < 5e-3


def test_wide_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="float32; the kernels take"):
        Scene([np.array([3])]).run(True, torch.float32, "cpu")


def test_a_wrong_batch_is_refused_before_it_is_uploaded() -> None:
    scene = Scene([np.array([3])])
    with pytest.raises(ValueError, match="leave the pool"):
        build_layout([scene.slots[0] + len(scene.base)], scene.base, scene.queries, scene.turns, kernels=True)
