"""Expanded attention of many queries a sequence against float64 of the same stored rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from irminsul_kernels import turns_per_position

pytest.importorskip("triton")
from irminsul_kernels.attention.expanded import expanded, expanded_reference
from irminsul_kernels.attention.plans import QUERIES, chunk_keys, plan_expanded

CAPACITY = 1024
FAR = 131072


class Scene:
    """Sequences of a flat batch; two thirds of each lie at slots moved from elsewhere. Unused rows are NaN."""

    def __init__(
        self,
        queries: list[np.ndarray],
        *,
        heads: int = 2,
        sizes: tuple[int, int, int, int] = (32, 32, 16, 16),
        dtype: torch.dtype = torch.bfloat16,
        seed: int = 0,
    ) -> None:
        rank, rope, nope, value = sizes
        rng, g = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
        self.turns = turns_per_position(10000.0 ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope))
        self.rows = torch.full((CAPACITY, rank + rope), float("nan")).to(dtype)
        self.base = torch.full((CAPACITY,), 2**31 - 1, dtype=torch.int32)
        order = torch.from_numpy(rng.permutation(CAPACITY))
        shared = order[:100]
        self.rows[shared] = torch.randn(100, rank + rope, generator=g).to(dtype)
        self.base[shared] = torch.arange(FAR, FAR + 100, dtype=torch.int32)
        flat, self.sequences, used, at, begin = [], [], 100, 0, 0
        for positions in queries:
            n = int(positions[-1]) + 1
            third = min(n // 3, 100)
            own = order[used : used + n - third]
            used += len(own)
            self.rows[own] = torch.randn(len(own), rank + rope, generator=g).to(dtype)
            # the first half of its own rows was computed elsewhere, the rest here
            here = torch.arange(third, n)
            self.base[own] = torch.where(here < n // 2, here + 77, here).int()
            self.sequences.append((at, begin, positions))
            flat.append(torch.cat((shared[:third], own)))
            at, begin = at + len(positions), begin + n
        flat.append(torch.full((64,), 2**30))
        self.slots = torch.cat(flat).int()
        self.q_positions = torch.from_numpy(np.concatenate(queries).astype(np.int32))
        self.q_nope = torch.randn(at, heads, nope, generator=g).to(dtype)
        self.q_rope = torch.randn(at, heads, rope, generator=g).to(dtype)
        self.w_uk = (torch.randn(heads, nope, rank, generator=g) * rank**-0.5).to(dtype)
        self.w_uv = (torch.randn(heads, rank, value, generator=g) * rank**-0.5).to(dtype)
        self.scale = (nope + rope) ** -0.5

    def arguments(self, chunk: int) -> dict:
        names = ("q_nope", "q_rope", "rows", "slots", "q_positions", "base", "turns", "w_uk", "w_uv", "scale")
        plan = plan_expanded(self.sequences, len(self.q_nope), chunk, "cpu")
        return {name: getattr(self, name) for name in names} | {"plan": plan}

    def error(self, chunk: int = 4096, out_dtype: torch.dtype = torch.float32) -> float:
        """Relative L2."""
        arguments = self.arguments(chunk)
        out = torch.full((*self.q_nope.shape[:2], self.w_uv.shape[2]), float("nan"), dtype=out_dtype)
        found = expanded(**arguments, out=out)
        del arguments["plan"], arguments["q_positions"]
        exact = expanded_reference(**arguments, sequences=self.sequences)
        return ((found.double() - exact).norm() / exact.norm()).item()


def holes(length: int, count: int) -> np.ndarray:
    """`count` positions, the last one among them."""
    rng = np.random.default_rng(length)
    return np.sort(np.append(rng.choice(length - 1, count - 1, replace=False), length - 1))


@pytest.mark.interpreter
class TestAgainstFloat64:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_ragged_holes(self, dtype: torch.dtype) -> None:
        queries = [holes(150, 140), np.arange(3), np.array([64]), np.arange(50, 99)]
        assert Scene(queries, dtype=dtype).error() < 1e-3

    @pytest.mark.parametrize("chunk", [1, 70, 128])
    def test_chunks_are_merged(self, chunk: int) -> None:
        """Chunks end inside sequences and between them; some queries see nothing of a later chunk."""
        queries = [np.array([1, 30, 150]), np.arange(20, 80)] if chunk > 1 else [np.array([0, 3]), np.array([2])]
        assert Scene(queries).error(chunk) < 1e-3

    def test_the_published_head(self) -> None:
        assert Scene([np.arange(40, 70)], sizes=(512, 64, 128, 128)).error() < 1e-3

    def test_heads_that_are_no_power_of_two(self) -> None:
        assert Scene([np.arange(40, 70)], heads=3, sizes=(48, 32, 48, 80)).error() < 1e-3

    @pytest.mark.parametrize("chunk", [50, 4096])
    def test_narrow_output_is_rounded_once(self, chunk: int) -> None:
        assert Scene([np.arange(40, 70)]).error(chunk, torch.bfloat16) < 2e-3


class TestPlan:
    def test_every_query_meets_all_its_keys(self) -> None:
        queries = [holes(5000, 700), np.arange(300), np.arange(4000, 4129)]
        starts = np.cumsum([0, *map(len, queries)])
        slots = np.cumsum([0, *(q[-1] + 1 for q in queries)])
        sequences = [(int(a), int(b), q) for a, b, q in zip(starts, slots, queries, strict=False)]
        plan = plan_expanded(sequences, int(starts[-1]), 1024, "cpu")
        seen = np.zeros(starts[-1], np.int64)
        for chunk in plan.chunks:
            assert chunk.keys == chunk.spans[:, 1].sum() <= 1024
            for first, count, place, position, keys, merge in chunk.pieces.tolist():
                assert 0 < count <= QUERIES and 0 < keys <= chunk.keys - place and merge == (position > 0)
                assert (seen[first : first + count] == position).all()
                seen[first : first + count] += keys
        assert (seen >= np.concatenate(queries) + 1).all()
        assert sum(chunk.keys for chunk in plan.chunks) == slots[-1]

    def test_chunks_of_the_published_shapes(self) -> None:
        assert chunk_keys(16, 128, 128) == 32768
        assert chunk_keys(128, 128, 128) == 4096

    def test_nothing_to_do(self) -> None:
        assert plan_expanded([], 5, 1024, "cpu").chunks == []

    def test_empty_chunks_are_refused(self) -> None:
        with pytest.raises(ValueError, match="chunk is 0"):
            plan_expanded([], 5, 0, "cpu")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(slots=torch.zeros(10, dtype=torch.int64)), "slots is torch.int64"),
        (dict(rows=torch.zeros(CAPACITY, 64)), "rows is torch.float32"),
        (dict(w_uk=torch.zeros(2, 16, 48).bfloat16()), "must be torch.bfloat16"),
        (dict(w_uv=torch.zeros(2, 16, 32).bfloat16().mT), "w_uv has strides"),
        (dict(base=torch.zeros(CAPACITY, dtype=torch.int32, device="meta")), "one device"),
        (dict(q_nope=torch.zeros(2, 2, 20).bfloat16()), "nope_dim is 20"),
        (dict(plan=plan_expanded([], 3, 1024, "cpu")), "the plan is for 3 queries"),
    ],
)
def test_wrong_input_names_itself(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        expanded(**{**Scene([np.array([3, 7])]).arguments(1024), **change})


def test_a_cpu_is_refused() -> None:
    scene = Scene([np.array([3, 7])])
    with pytest.raises(ValueError, match="rows are on cpu"):
        expanded(**scene.arguments(1024))
