"""The torch path against a float64 computation that never moves a row: every key is rotated afresh from its raw k."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from irminsul_kernels import build_layout, cos_sin, expanded_threshold, mla_attention, rotate, turns_per_position

RANK, ROPE, NOPE, VALUE = 48, 16, 12, 20


def rope(x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor) -> torch.Tensor:
    angle = positions.double()[:, None] * inv_freq
    shape = (len(positions),) + (1,) * (x.dim() - 2) + (inv_freq.numel(),)
    c, s = angle.cos().view(shape), angle.sin().view(shape)
    a, b = x.double().chunk(2, -1)
    return torch.cat((a * c - b * s, b * c + a * s), -1)


class Scene:
    """Sequences that share slots at different positions; everything unused is NaN."""

    def __init__(self, seed: int, heads: int, lengths: list[int], layout_of: str, capacity: int = 4096) -> None:
        g = torch.Generator().manual_seed(seed)
        rng = np.random.default_rng(seed)
        self.inv_freq = 10000.0 ** (-torch.arange(0, ROPE, 2, dtype=torch.float64) / ROPE)
        self.rows = torch.full((capacity, RANK + ROPE), float("nan"))
        self.base = np.full(capacity, 2**30, np.int32)
        self.raw = torch.full((capacity, RANK + ROPE), float("nan"), dtype=torch.float64)
        order = rng.permutation(capacity - 1) if layout_of == "scattered" else np.arange(capacity - 1)
        used = 0

        def fresh(n: int, start: int) -> np.ndarray:
            nonlocal used
            slots = order[used : used + n].astype(np.int32)
            used += n
            raw = torch.randn(n, RANK + ROPE, generator=g, dtype=torch.float64)
            positions = torch.arange(start, start + n)
            self.raw[slots] = raw
            self.base[slots] = positions.numpy()
            moved = torch.cat((raw[:, :RANK], rope(raw[:, RANK:], positions, self.inv_freq)), 1)
            self.rows[slots] = moved.float()
            return slots

        self.slots = []
        shared = fresh(150, 1000)
        for length in lengths:
            parts, have = [], 0
            while have < length:
                n = int(min(length - have, rng.integers(1, 90)))
                if rng.random() < 0.5:
                    at = int(rng.integers(0, 150 - n)) if n < 150 else 0
                    parts.append(shared[at : at + n])
                else:
                    parts.append(fresh(n, int(rng.integers(0, 2000))))
                have += n
            self.slots.append(np.concatenate(parts))
        self.heads = heads
        self.w_uk = torch.randn(heads, NOPE, RANK, generator=g)
        self.w_uv = torch.randn(heads, RANK, VALUE, generator=g)
        self.g = g

    def check(self, q_positions: list[np.ndarray], min_run: int) -> None:
        total = sum(map(len, q_positions))
        q_nope = torch.randn(total, self.heads, NOPE, generator=self.g)
        q_rope = torch.randn(total, self.heads, ROPE, generator=self.g)
        before = self.rows.clone()
        layout = build_layout(self.slots, self.base, q_positions, turns_per_position(self.inv_freq), min_run=min_run)
        out = mla_attention(q_nope, q_rope, self.rows, layout, self.w_uk, self.w_uv, 0.1)
        assert torch.equal(before.nan_to_num(7.0), self.rows.nan_to_num(7.0)), "rows are never rewritten"
        want, at = [], 0
        for slots, positions in zip(self.slots, q_positions, strict=True):
            c = self.raw[slots][:, :RANK]
            k_rope = rope(self.raw[slots][:, RANK:], torch.arange(len(slots)), self.inv_freq)
            keys = torch.einsum("kr,hnr->khn", c, self.w_uk.double())
            values = torch.einsum("kr,hrv->khv", c, self.w_uv.double())
            for i, p in enumerate(positions):
                qn, qr = q_nope[at + i].double(), q_rope[at + i].double()
                seen = int(p) + 1
                s = torch.einsum("hn,khn->hk", qn, keys[:seen]) + torch.einsum("hd,kd->hk", qr, k_rope[:seen])
                want.append(torch.einsum("hk,khv->hv", torch.softmax(s * 0.1, -1), values[:seen]))
            at += len(positions)
        reference = torch.stack(want)
        error = ((out.double() - reference).norm() / reference.norm()).item()
        assert error < 5e-6, error


@pytest.mark.parametrize("min_run", [1, 100_000], ids=["runs", "gathered"])
@pytest.mark.parametrize("order", ["in_order", "scattered"])
@pytest.mark.parametrize("heads", [1, 3])
def test_ragged_batches_agree_with_float64(heads: int, order: str, min_run: int) -> None:
    lengths = [1, 63, 64, 65, 128, 401]
    scene = Scene(heads, heads, lengths, order)
    scene.check([np.array([n - 1]) for n in lengths], min_run)
    rng = np.random.default_rng(5)
    holes = [np.sort(rng.choice(n, size=max(1, n // 3), replace=False)) for n in lengths]
    scene.check(holes, min_run)
    scene.check([np.arange(n) for n in lengths], min_run)


def test_both_forms_are_used_and_meet_at_the_threshold() -> None:
    threshold = expanded_threshold(RANK, NOPE, VALUE)
    scene = Scene(9, 2, [300, 300], "in_order")
    scene.check([np.arange(300 - n, 300) for n in (threshold - 1, threshold)], 1)


def test_threshold_of_the_published_shape() -> None:
    assert expanded_threshold(512, 128, 128) == 171


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(q_positions=[np.array([5])]), "leave its 5 slots"),
        (dict(q_positions=[np.array([], dtype=np.int64)]), "no query"),
        (dict(q_positions=[np.array([2, 2])]), "ascending"),
        (dict(slots=[np.array([0, 1, 64, 3, 4], np.int32)]), "leave the pool"),
        (dict(slots=[np.array([0, -1, 2, 3, 4], np.int32)]), "leave the pool"),
    ],
)
def test_a_wrong_layout_is_refused(change: dict, message: str) -> None:
    turns = turns_per_position(torch.ones(2, dtype=torch.float64))
    arguments = dict(slots=[np.arange(5, dtype=np.int32)], base=np.zeros(64, np.int32), q_positions=[np.array([4])])
    with pytest.raises(ValueError, match=message):
        build_layout(**{**arguments, **change}, turns=turns)


def test_wrong_shapes_name_themselves() -> None:
    layout = build_layout(
        [np.arange(4, dtype=np.int32)],
        np.zeros(8, np.int32),
        [np.array([3])],
        turns_per_position(torch.ones(2).double()),
    )
    q, qr, uk, uv = torch.zeros(1, 2, 3), torch.zeros(1, 2, 4), torch.zeros(2, 3, 5), torch.zeros(2, 5, 6)
    with pytest.raises(ValueError, match="rows are 8 wide"):
        mla_attention(q, qr, torch.zeros(8, 8), layout, uk, uv, 1.0)
    with pytest.raises(ValueError, match="the layout 1"):
        mla_attention(q.expand(2, 2, 3), qr, torch.zeros(8, 9), layout, uk, uv, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        mla_attention(q, qr[:, :1], torch.zeros(8, 9), layout, uk, uv, 1.0)


class TestRotation:
    def test_angles_are_exact_at_any_distance(self) -> None:
        inv_freq = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        positions = torch.randint(-131072, 131073, (4096,))
        cos, sin = cos_sin(positions, turns_per_position(inv_freq))
        angle = positions.double()[:, None] * inv_freq
        assert (cos - angle.cos()).abs().max() < 4e-7
        assert (sin - angle.sin()).abs().max() < 4e-7

    def test_moving_a_bf16_row_costs_no_more_than_computing_it_there(self) -> None:
        """The stored row is rounded once; rotating it in fp32 adds nothing (the paper reports 4.7e-3)."""
        inv_freq = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
        k = torch.randn(4096, 64, dtype=torch.float64)
        position, delta = torch.randint(0, 131072, (4096,)), torch.randint(-131072, 131073, (4096,))
        stored = rope(k, position, inv_freq).bfloat16()
        moved = rotate(stored, *cos_sin(delta, turns_per_position(inv_freq)))
        exact = rope(k, position + delta, inv_freq)
        assert ((moved.double() - exact).norm() / exact.norm()).item() < 1.7e-3

    def test_single_precision_frequencies_are_refused(self) -> None:
        with pytest.raises(ValueError, match="float64"):
            turns_per_position(torch.ones(4))
