"""The decode kernel, interpreted on the CPU, against float64 that rotates every key afresh from its raw value."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from irminsul_kernels import turns_per_position
from irminsul_kernels.attention.decode import decode_attention, decode_reference, supports, tuning
from irminsul_kernels.attention.plans import plan_splits, workspace_size
from irminsul_kernels.checks import check_slots

NAN = float("nan")


def plain(rope_dim: int) -> torch.Tensor:
    return 10000.0 ** (-torch.arange(0, rope_dim, 2, dtype=torch.float64) / rope_dim)


def yarn(rope_dim: int) -> torch.Tensor:
    """Interpolated by 40 where the wave is longer than the original context, ramp between."""
    inv_freq = plain(rope_dim)
    ramp = torch.linspace(0, 1, rope_dim // 2, dtype=torch.float64)
    return inv_freq / 40 * ramp + inv_freq * (1 - ramp)


def rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    """float64 [..., n, d] rotated for int64 [n]."""
    angle = positions.double()[:, None] * inv_freq
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Scene:
    """A pool that is NaN where no sequence looks, and sequences made of runs of other positions."""

    def __init__(
        self,
        lengths: list[int],
        deltas: str,
        heads: int = 4,
        rank: int = 64,
        rope_dim: int = 32,
        dtype: torch.dtype = torch.bfloat16,
        inv_freq: torch.Tensor | None = None,
        far: int = 131_072,
        seed: int = 0,
    ) -> None:
        rng = np.random.default_rng(seed)
        g = torch.Generator().manual_seed(seed)
        self.inv_freq = plain(rope_dim) if inv_freq is None else inv_freq
        self.rank, self.scale = rank, 1 / math.sqrt(rank + rope_dim)
        total = sum(lengths)
        capacity = 2 * total + 16
        self.raw = torch.randn(capacity, rank + rope_dim, generator=g, dtype=torch.float64)
        self.base = torch.full((capacity,), -(2**30), dtype=torch.int32)
        self.rows = torch.full((capacity, rank + rope_dim), NAN, dtype=dtype)
        self.kv_indptr = torch.tensor(np.concatenate(([0], np.cumsum(lengths))), dtype=torch.int32)
        slots = rng.permutation(capacity)[:total]
        position = np.concatenate([np.arange(n) for n in lengths]) if lengths else np.zeros(0, int)
        if deltas == "zero":
            delta = np.zeros(total, int)
        elif deltas == "rows":
            delta = rng.integers(-far, far, total)
        elif deltas == "two":  # two values in turn by chance, as after recomputing single tokens
            delta = np.where(rng.random(total) < 0.3, 0, -far)
        else:  # runs
            delta = np.repeat(rng.integers(-far, far, total), rng.integers(1, 200, total))[:total]
        self.slots = torch.tensor(slots, dtype=torch.int32)
        if deltas == "shared":  # later sequences are pieces of the first, at other positions
            first, at = lengths[0], lengths[0]
            for n in lengths[1:]:
                begin = int(rng.integers(0, first - n + 1))
                slots[at : at + n] = slots[begin : begin + n]
                at += n
            self.slots = torch.tensor(slots, dtype=torch.int32)
            delta, position = delta[:first], position[:first]
            slots = slots[:first]
        self.base[slots] = torch.tensor(position - delta, dtype=torch.int32)
        moved = rope(self.raw[slots, rank:], self.base[slots].long(), self.inv_freq)
        self.rows[slots] = torch.cat((self.raw[slots, :rank], moved), 1).to(dtype)
        self.turns = turns_per_position(self.inv_freq)
        self.q_latent = torch.randn(len(lengths), heads, rank, generator=g).to(dtype)
        self.q_rope = torch.randn(len(lengths), heads, rope_dim, generator=g).to(dtype)
        self.max_length = max(lengths, default=0)

    def arguments(self) -> dict[str, Any]:
        names = ("q_latent", "q_rope", "rows", "base", "slots", "kv_indptr", "turns", "scale", "max_length")
        return {name: getattr(self, name) for name in names}

    def expected(self, stored: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 attention of the bf16 rows (stored) or of the raw values before they were rounded to rows."""
        out, lse = torch.zeros(self.q_latent.shape, dtype=torch.float64), torch.zeros(self.q_latent.shape[:2]).double()
        for b in range(len(self.q_latent)):
            slot = self.slots[self.kv_indptr[b] : self.kv_indptr[b + 1]].long()
            j = torch.arange(len(slot))
            if stored:
                keys = self.rows[slot].double()
                k_r = rope(keys[:, self.rank :], j - self.base[slot], self.inv_freq)
            else:
                keys = self.raw[slot]
                k_r = rope(keys[:, self.rank :], j, self.inv_freq)
            c = keys[:, : self.rank]
            scores = (self.q_latent[b].double() @ c.T + self.q_rope[b].double() @ k_r.T) * self.scale
            lse[b] = scores.logsumexp(-1)
            out[b] = scores.softmax(-1) @ c
        return out, lse


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found.double() - expected).norm() / expected.norm()).item()


def assert_right(scene: Scene, limit: float = 2e-3, **options: Any) -> None:
    out, lse = decode_attention(**scene.arguments(), out=torch.full(scene.q_latent.shape, NAN), **options)
    expected, expected_lse = scene.expected()
    filled = scene.kv_indptr.diff() > 0
    assert relative(out[filled], expected[filled]) <= limit
    torch.testing.assert_close(lse.double()[filled], expected_lse[filled], rtol=0, atol=2e-3)
    assert (out[~filled] == 0).all() and (lse[~filled] == -math.inf).all()


@pytest.mark.interpreter
class TestKernel:
    """Rows that no sequence names are NaN in every scene: a single one read would show."""

    @pytest.mark.parametrize("deltas", ["zero", "runs", "two", "rows"])
    def test_ragged_batch(self, deltas: str) -> None:
        """Runs longer and shorter than tiles, tiles of several δ, one δ a row, none; lengths around a tile's 64."""
        assert_right(Scene([300, 1, 64, 65, 127], deltas))

    def test_shared_rows_at_several_positions(self) -> None:
        assert_right(Scene([300, 90, 200, 64], "shared"))

    @pytest.mark.parametrize("num_splits", [1, 2, 7])
    def test_empty_sequences_and_empty_splits(self, num_splits: int) -> None:
        """Splits have at least four tiles: most of the seven are empty, and so are two sequences."""
        assert_right(Scene([0, 300, 0, 3], "runs"), num_splits=num_splits)

    @pytest.mark.parametrize("lengths", [[1], [2, 63], [66, 17, 5]])
    def test_small(self, lengths: list[int]) -> None:
        assert_right(Scene(lengths, "rows", seed=len(lengths)))

    @pytest.mark.parametrize("heads", [1, 16, 17])
    def test_head_counts_that_do_not_fill_a_block(self, heads: int) -> None:
        assert_right(Scene([70, 9], "runs", heads=heads))

    @pytest.mark.parametrize("inv_freq", [plain, yarn])
    @pytest.mark.parametrize("deltas", ["runs", "rows"])
    def test_full_size_rows_far_away(self, inv_freq: Any, deltas: str) -> None:
        """512 + 64, |δ| up to 131,072."""
        scene = Scene([150, 40], deltas, heads=16, rank=512, rope_dim=64, inv_freq=inv_freq(64))
        assert_right(scene)

    def test_fp16(self) -> None:
        assert_right(Scene([130, 64], "two", dtype=torch.float16), limit=4e-4)

    def test_float32_rope_queries_and_bf16_output(self) -> None:
        scene = Scene([80], "runs")
        scene.q_rope = scene.q_rope.float()
        out, _ = decode_attention(**scene.arguments())
        assert out.dtype == torch.bfloat16
        assert relative(out, scene.expected()[0]) <= 4e-3

    def test_lookahead_ends_within_a_run(self) -> None:
        """A run longer than the 1,024 rows that are looked at ahead, then another one."""
        scene = Scene([1300], "zero", heads=1, rank=16)
        scene.base[scene.slots[1200:].long()] -= 5000
        moved = rope(scene.raw[:, 16:], scene.base.long(), scene.inv_freq)
        used = scene.slots.long()
        scene.rows[used, 16:] = moved[used].to(scene.rows.dtype)
        assert_right(scene, num_splits=1)

    @pytest.mark.parametrize("alone", [True, False])
    def test_rotation_alone(self, alone: bool) -> None:
        """Scores of one-hot queries are the moved key itself: off by 1.7e-3 at most from float64 of the raw key.

        A sequence of one row is a run; after a row of another δ the same row is rotated on the key side.
        """
        moved, exact = [], []
        for seed in range(2 if alone else 1):
            scene = Scene([1] * 3 if alone else [2] * 3, "rows", heads=64, rope_dim=64, rank=16, seed=seed)
            scene.q_latent.zero_()
            scene.q_rope = torch.eye(64).expand(3, 64, 64).to(scene.rows.dtype).contiguous()
            scene.scale = 1.0
            _, lse = decode_attention(**scene.arguments())
            expected = scene.expected(stored=False)[1]
            if alone:
                moved.append(lse.double())
                exact.append(expected)
            else:
                stored = scene.expected(stored=True)[1]
                torch.testing.assert_close(lse.double(), stored, rtol=0, atol=2e-3)
        if alone:
            assert relative(torch.cat(moved), torch.cat(exact)) <= 1.7e-3

    def test_preallocated(self) -> None:
        """With everything given the call fills exactly what it was given and only that."""
        scene = Scene([300, 40], "runs")
        size = workspace_size(2, 4, 64, 3)
        workspace = torch.full((size + 7,), NAN)
        out, lse = torch.empty_like(scene.q_latent, dtype=torch.float32), torch.empty(2, 4)
        found = decode_attention(**scene.arguments(), out=out, lse=lse, workspace=workspace, num_splits=3, check=True)
        assert found[0] is out and found[1] is lse
        assert workspace[size:].isnan().all()
        assert relative(out, scene.expected()[0]) <= 2e-3

    def test_longer_than_announced(self) -> None:
        """max_length only plans the splits."""
        scene = Scene([400], "runs")
        scene.max_length = 10
        assert_right(scene)

    def test_moving_often_is_moving_once(self) -> None:
        """Rows are not written: read at other positions in between, they give the same bits at the first one."""
        scene = Scene([70], "runs")
        before, rows = decode_attention(**scene.arguments())[0], scene.rows.clone()
        base = scene.base.clone()
        for shift in (1000, -70_000):
            scene.base = base + shift
            decode_attention(**scene.arguments())
        scene.base = base
        assert torch.equal(decode_attention(**scene.arguments())[0], before)
        assert torch.equal(scene.rows.view(torch.int16), rows.view(torch.int16))


class TestReference:
    @pytest.mark.parametrize("deltas", ["zero", "runs", "two", "rows", "shared"])
    def test_against_float64(self, deltas: str) -> None:
        scene = Scene([300, 1, 65, 0], deltas)
        arguments = scene.arguments()
        del arguments["max_length"]
        out, lse = decode_reference(**arguments)
        expected, expected_lse = scene.expected()
        assert relative(out[:3], expected[:3]) <= 2e-6
        torch.testing.assert_close(lse[:3].double(), expected_lse[:3], rtol=0, atol=1e-5)
        assert (out[3] == 0).all() and (lse[3] == -math.inf).all()

    def test_wrapper_takes_it_on_the_cpu(self) -> None:
        scene = Scene([30, 4], "runs")
        out, _ = decode_attention(**scene.arguments())
        assert relative(out, scene.expected()[0]) <= 2e-3


class TestPlan:
    def test_one_long_sequence_fills_the_device(self) -> None:
        assert 64 < plan_splits(1, 16, 131_072, 132, tuning(512, 90)) <= 128

    def test_many_sequences_make_one_wave(self) -> None:
        assert plan_splits(64, 16, 8192, 132, tuning(512, 90)) == 2
        assert plan_splits(132, 16, 8192, 132, tuning(512, 90)) == 1

    def test_short_sequences_are_not_split(self) -> None:
        assert plan_splits(1, 16, 100, 132, tuning(512, 90)) == 1
        assert plan_splits(1, 16, 0, 132, tuning(512, 90)) == 1


class TestBadInput:
    @pytest.mark.parametrize(
        "change, message",
        [
            (
                dict(slots=torch.zeros(34, dtype=torch.int64)),
                r"slots is torch.int64 \(34,\); it must be torch.int32 \(34,\)",
            ),
            (
                dict(kv_indptr=torch.zeros(2, dtype=torch.int32)),
                r"kv_indptr is torch.int32 \(2,\); it must be torch.int32 \(3,\)",
            ),
            (dict(base=torch.zeros(5, dtype=torch.int32)), r"base is torch.int32 \(5,\)"),
            (dict(turns=torch.zeros(16)), r"turns is torch.float32 \(16,\); it must be torch.int64"),
            (dict(rows=torch.zeros(84, 96)), r"rows is torch.float32 \(84, 96\); it must be torch.bfloat16"),
            (dict(rows=torch.zeros(96, 84, dtype=torch.bfloat16).T), r"rows has strides \(1, 84\); make it contiguous"),
            (dict(base=torch.zeros(84, dtype=torch.int32, device="meta")), "base is on meta, rows on cpu"),
            (dict(q_latent=torch.zeros(2, 240)), r"q_latent is \(2, 240\); it must be \[batch, heads, rank\]"),
            (dict(max_length=-1), "max_length is -1"),
            (dict(num_splits=0), "num_splits is 0; 1 to 128"),
            (dict(num_splits=2, workspace=torch.zeros(9)), "workspace holds 9 numbers; 2 splits need 1040"),
            (dict(workspace=torch.zeros(9)), "workspace without num_splits"),
            (
                dict(q_latent=torch.zeros(2, 4, 60, dtype=torch.bfloat16)),
                r"rows is torch.bfloat16 \(84, 96\); it must be torch.bfloat16 \(84, 92\)",
            ),
        ],
    )
    def test_named_before_launch(self, change: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            decode_attention(**(Scene([30, 4], "runs").arguments() | change))

    def test_shapes_without_configuration(self) -> None:
        with pytest.raises(ValueError, match=r"129 heads and rows .* have no configuration: 1 to 128 heads"):
            decode_attention(**Scene([3], "runs", heads=129).arguments())
        with pytest.raises(ValueError, match=r"rows of 48 \+ 32 have no configuration"):
            decode_attention(**Scene([3], "runs", rank=48).arguments())

    def test_supports_says_the_same(self) -> None:
        assert supports(128, 512, 64, torch.bfloat16) and supports(1, 16, 32, torch.float16)
        for shape in ((129, 512, 64), (0, 512, 64), (16, 48, 64), (16, 1024, 64), (16, 512, 48)):
            assert not supports(*shape, torch.bfloat16), shape
        assert not supports(16, 512, 64, torch.float32)

    def test_contents_are_looked_at_on_request(self) -> None:
        slots, indptr = torch.arange(10, dtype=torch.int32), torch.tensor([0, 4, 10], dtype=torch.int32)
        check_slots(slots, indptr, 10, 6)
        with pytest.raises(ValueError, match=r"slots 0..9 leave the pool of 9"):
            check_slots(slots, indptr, 9, 6)
        with pytest.raises(ValueError, match="a sequence of 6 rows; max_length is 5"):
            check_slots(slots, indptr, 10, 5)
        with pytest.raises(ValueError, match="ends at 10; slots holds 9"):
            check_slots(slots[:9], indptr, 10, 6)
        with pytest.raises(ValueError, match="must ascend"):
            check_slots(slots, torch.tensor([0, 4, 3], dtype=torch.int32), 10, 6)
