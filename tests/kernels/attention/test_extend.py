"""Absorbed attention of several queries a sequence against float64 of the same stored rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from irminsul_kernels import turns_per_position

pytest.importorskip("triton")
from irminsul_kernels.attention.extend import extend, extend_reference
from irminsul_kernels.attention.plans import heads_per_tile, plan_extend

CAPACITY = 2048
FAR = 131072


class Scene:
    """Sequences of a flat batch whose runs of slots are shared at different positions. Unused rows are NaN."""

    def __init__(
        self,
        queries: list[np.ndarray],
        *,
        heads: int = 4,
        rank: int = 32,
        rope: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        moved: str = "per run",
        seed: int = 0,
    ) -> None:
        rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.turns = turns_per_position(10000.0 ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope))
        self.rows = torch.full((CAPACITY, rank + rope), float("nan")).to(dtype)
        self.base = torch.full((CAPACITY,), 2**31 - 1, dtype=torch.int32)
        order = np.arange(CAPACITY) if moved == "nowhere" else rng.permutation(CAPACITY)
        used = 0

        def fresh(positions: np.ndarray) -> np.ndarray:
            nonlocal used
            slots = order[used : used + len(positions)]
            used += len(positions)
            self.rows[slots] = torch.randn(len(slots), rank + rope, generator=g).to(dtype)
            self.base[slots] = torch.from_numpy(positions.astype(np.int32))
            return slots

        shared = fresh(np.arange(100, 200))
        flat, self.sequences, at = [], [], 0
        for positions in queries:
            n = int(positions[-1]) + 1
            if moved == "nowhere":
                slots = fresh(np.arange(n))
            elif moved == "per row":
                slots = fresh(np.arange(n) - rng.integers(-FAR, FAR, n))
            else:
                half = n // 2
                slots = np.concatenate((fresh(np.arange(half) + FAR), shared[: n - half], fresh(np.arange(n))))[:n]
            self.sequences.append((at, sum(map(len, flat)), positions))
            flat.append(slots)
            at += len(positions)
        # slots after the last position belong to nobody: they must not be touched
        flat.append(np.full(64, 2**30))
        self.slots = torch.from_numpy(np.concatenate(flat).astype(np.int32))
        self.q_positions = torch.from_numpy(np.concatenate(queries).astype(np.int32))
        self.q_latent = torch.randn(at, heads, rank, generator=g).to(dtype)
        self.q_rope = torch.randn(at, heads, rope, generator=g).to(dtype)
        self.scale = (rank + rope) ** -0.5

    def error(self, multiprocessors: int = 1, out_dtype: torch.dtype = torch.float32) -> float:
        """Relative L2."""
        tokens, heads, _ = self.q_latent.shape
        plan = plan_extend(self.sequences, tokens, heads, "cpu", multiprocessors)
        inputs = (self.q_latent, self.q_rope, self.rows, self.slots, self.q_positions)
        out = torch.full(self.q_latent.shape, float("nan"), dtype=out_dtype)
        found = extend(*inputs, self.base, self.turns, plan, self.scale, out)
        exact = extend_reference(*inputs, self.sequences, self.base, self.turns, self.scale)
        return ((found.double() - exact).norm() / exact.norm()).item()


def holes(rng: np.random.Generator, length: int, count: int) -> np.ndarray:
    """`count` positions, the last one among them."""
    return np.sort(np.append(rng.choice(length - 1, count - 1, replace=False), length - 1))


@pytest.mark.interpreter
class TestAgainstFloat64:
    @pytest.mark.parametrize(
        ("dtype", "moved"),
        [
            (torch.bfloat16, "nowhere"),
            (torch.bfloat16, "per run"),
            (torch.bfloat16, "per row"),
            (torch.float16, "per row"),
        ],
    )
    def test_ragged_holes(self, dtype: torch.dtype, moved: str) -> None:
        rng = np.random.default_rng(1)
        queries = [holes(rng, n, max(1, n // 3)) for n in (1, 2, 32, 33, 70)]
        assert Scene(queries, dtype=dtype, moved=moved).error() < (2e-3 if dtype == torch.bfloat16 else 5e-4)

    def test_the_published_row(self) -> None:
        queries = [np.array([0, 40, 41, 70])]
        assert Scene(queries, heads=16, rank=512, rope=64).error() < 2e-3

    @pytest.mark.parametrize("heads", [1, 3, 8, 80])
    def test_head_counts(self, heads: int) -> None:
        assert Scene([np.array([3, 70]), np.array([0])], heads=heads).error() < 2e-3

    def test_rows_that_are_no_power_of_two(self) -> None:
        assert Scene([np.array([3, 70])], rank=48, rope=48).error() < 2e-3

    def test_walks_cut_into_pieces(self) -> None:
        """Pieces that begin after a token's position give nothing to it."""
        scene = Scene([np.array([5, 600]), np.array([10]), np.array([255, 256])], moved="nowhere")
        assert len(plan_extend(scene.sequences, 5, 4, "cpu", 132).merges) == 2
        assert scene.error(multiprocessors=132) < 2e-3

    def test_narrow_output_is_rounded_once(self) -> None:
        assert Scene([np.array([3, 70])]).error(out_dtype=torch.bfloat16) < 3e-3


class TestPlan:
    def test_every_key_of_every_query_is_visited_once(self) -> None:
        rng = np.random.default_rng(2)
        queries = [holes(rng, n, max(1, n // 7)) for n in (1, 300, 5000, 70_000)]
        starts = np.cumsum([0, *map(len, queries)])
        sequences = [(int(s), 0, q) for s, q in zip(starts, queries, strict=False)]
        for multiprocessors in (1, 132):
            plan = plan_extend(sequences, int(starts[-1]), 16, "cpu", multiprocessors)
            visits = np.zeros(starts[-1], np.int64)
            for first, count, _, begin, end, _ in plan.pieces.tolist():
                assert 0 < count <= plan.pairs // heads_per_tile(16)
                visits[first : first + count] += end - begin
            assert (visits >= np.concatenate(queries) + 1).all()
            ends = {int(q[-1]) + 1 for q in queries}
            assert ends <= set(plan.pieces[:, 4].tolist())
            partials = plan.pieces[:, 5]
            assert sorted(partials[partials >= 0].tolist()) == list(range(plan.num_partials))
            assert plan.merges[:, 3].sum() == plan.num_partials

    def test_long_walks_go_first(self) -> None:
        plan = plan_extend([(0, 0, np.arange(64))], 64, 16, "cpu", 1)
        ends = plan.pieces[:, 4].tolist()
        assert ends == sorted(ends, reverse=True)

    def test_nothing_to_do(self) -> None:
        plan = plan_extend([], 5, 16, "cpu")
        assert len(plan.pieces) == len(plan.merges) == plan.num_partials == 0

    def test_no_head_is_refused(self) -> None:
        with pytest.raises(ValueError, match="heads is 0"):
            plan_extend([], 5, 0, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(slots=torch.zeros(10, dtype=torch.int64)), "slots is torch.int64"),
        (dict(q_positions=torch.zeros(3, dtype=torch.int32)), r"q_positions is torch.int32 \(3,\)"),
        (dict(rows=torch.zeros(CAPACITY, 64)), "rows is torch.float32"),
        (dict(rows=torch.zeros(CAPACITY, 48).bfloat16()), r"rows is torch.bfloat16 \(2048, 48\)"),
        (dict(q_latent=torch.zeros(2, 4, 64).bfloat16()[:, :, ::2]), "q_latent has strides"),
        (dict(turns=torch.zeros(8, dtype=torch.int64)), r"turns is torch.int64 \(8,\)"),
        (dict(base=torch.zeros(CAPACITY, dtype=torch.int32, device="meta")), "one device"),
        (dict(q_rope=torch.zeros(2, 4, 20).bfloat16()), "multiples of 16"),
        (dict(plan=plan_extend([], 2, 8, "cpu")), "the plan is for 2 queries of 8 heads"),
    ],
)
def test_wrong_input_names_itself(change: dict, message: str) -> None:
    scene = Scene([np.array([3, 7])])
    names = ("q_latent", "q_rope", "rows", "slots", "q_positions", "base", "turns", "scale")
    arguments = {name: getattr(scene, name) for name in names} | {"plan": plan_extend(scene.sequences, 2, 4, "cpu")}
    with pytest.raises(ValueError, match=message):
        extend(**{**arguments, **change})


def test_a_cpu_is_refused() -> None:
    scene = Scene([np.array([3, 7])])
    inputs = (scene.q_latent, scene.q_rope, scene.rows, scene.slots, scene.q_positions, scene.base, scene.turns)
    with pytest.raises(ValueError, match="rows are on cpu"):
        extend(*inputs, plan_extend(scene.sequences, 2, 4, "cpu"), 1.0)
