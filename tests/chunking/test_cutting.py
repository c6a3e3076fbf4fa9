"""Chunk boundaries: equal to a naive reference, bounded, independent of position, cheap to redo."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_backend.chunking import PRESETS, Preset, cut, recut, visible_marker
from irminsul_backend.chunking.cutting import rolling_hash

MASK = (1 << 64) - 1
TINY = Preset("tiny", 4, 16, 6, 3, 12, structure_cuts=True, extension=True, min_segment=1, s1_window=0)
ALL = [TINY, *PRESETS.values()]
presets = st.sampled_from(ALL)


def naive_mix(token: int) -> int:
    z = (token + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def naive_hashes(ids: list[int], preset: Preset) -> list[int]:
    h, out = 0, []
    for token in ids:
        h = ((h << preset.shift) + naive_mix(token)) & MASK
        out.append(h)
    return out


def naive_cut(ids: list[int], preset: Preset, edges: list[int]) -> list[int]:
    """Token by token: the first position that is allowed to end the chunk ends it."""
    n, hashes = len(ids), naive_hashes(ids, preset)
    inner = [e for e in edges if 0 < e < n]
    ends, start = [], 0
    for position in range(1, n + 1):
        length = position - start
        edge = next((e for e in inner if e >= start + preset.minimum), None)
        if position == n:
            wanted = True
        elif length < preset.minimum:
            wanted = False
        elif position == edge or length == preset.maximum:
            wanted = True
        elif edge is not None and edge - position < preset.minimum:
            wanted = False
        elif edge is not None and edge - position == preset.minimum and edge - start > preset.maximum:
            wanted = True  # the last chance to reach the edge with both bounds kept
        else:
            wanted = hashes[position - 1] < preset.threshold
        if wanted:
            ends.append(position)
            start = position
    return ends


@st.composite
def prompts(draw: st.DrawFn, longest: int = 700) -> np.ndarray:
    """Random, small-alphabet, periodic and constant stretches, one after the other."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    parts = []
    for _ in range(draw(st.integers(0, 3))):
        n = draw(st.integers(0, longest))
        kind = draw(st.sampled_from(["random", "few", "periodic", "equal"]))
        if kind == "random":
            parts.append(rng.integers(0, 129_280, n))
        elif kind == "few":
            parts.append(rng.integers(0, 3, n))
        else:
            period = rng.integers(0, 129_280, 1 if kind == "equal" else draw(st.integers(2, 40)))
            parts.append(np.resize(period, n))
    return np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32)


def draw_edges(data: st.DataObject, n: int) -> np.ndarray:
    return np.array(sorted(data.draw(st.sets(st.integers(0, n), max_size=20))), dtype=np.int32)


def check_bounds(ends: list[int], n: int, preset: Preset) -> None:
    assert (ends[-1] if ends else 0) == n
    lengths = [b - a for a, b in pairwise([0, *ends])]
    assert all(preset.minimum <= length for length in lengths[:-1])
    assert all(0 < length <= preset.maximum for length in lengths)


class TestRollingHash:
    @given(presets, prompts(200))
    def test_equals_the_recurrence(self, preset: Preset, ids: np.ndarray) -> None:
        assert rolling_hash(ids, preset).tolist() == naive_hashes(ids.tolist(), preset)

    @given(presets, prompts(200), prompts(50))
    def test_depends_on_the_window_only(self, preset: Preset, ids: np.ndarray, front: np.ndarray) -> None:
        hashes = rolling_hash(np.concatenate((front, ids)), preset)[len(front) :]
        assert (hashes[preset.window - 1 :] == rolling_hash(ids, preset)[preset.window - 1 :]).all()


class TestCut:
    @settings(max_examples=150, deadline=None)
    @given(presets, prompts(), st.data())
    def test_equals_the_naive_reference(self, preset: Preset, ids: np.ndarray, data: st.DataObject) -> None:
        edges = draw_edges(data, len(ids))
        ends = cut(ids, preset, edges)
        assert ends.dtype == np.int32
        assert ends.tolist() == naive_cut(ids.tolist(), preset, edges.tolist())

    @given(presets, prompts(), st.data())
    def test_bounds_always_hold(self, preset: Preset, ids: np.ndarray, data: st.DataObject) -> None:
        check_bounds(cut(ids, preset, draw_edges(data, len(ids))).tolist(), len(ids), preset)

    @given(presets, st.lists(st.integers(0, 5), min_size=1, max_size=40))
    def test_periodic_text_is_bounded(self, preset: Preset, period: list[int]) -> None:
        ids = np.resize(np.array(period, np.int32), 3000)
        ends = cut(ids, preset, None).tolist()
        check_bounds(ends, 3000, preset)
        assert 3000 / preset.maximum <= len(ends) <= 3000 / preset.minimum + 1

    @pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda p: p.name)
    def test_mean_length_is_the_presets(self, preset: Preset) -> None:
        ids = np.random.default_rng(7).integers(0, 129_280, 400_000).astype(np.int32)
        assert 400_000 / len(cut(ids, preset, None)) == pytest.approx(preset.mean, rel=0.05)

    def test_edges_far_apart_are_all_cuts(self) -> None:
        preset = PRESETS["default"]
        ids = np.random.default_rng(1).integers(0, 1000, 2000).astype(np.int32)
        edges = np.array([16, 300, 333, 349, 1900], np.int32)
        assert set(edges.tolist()) <= set(cut(ids, preset, edges).tolist())

    def test_a_short_piece_joins_the_next(self) -> None:
        preset = PRESETS["default"]
        ids = np.zeros(60, np.int32)
        assert cut(ids, preset, np.array([20, 25, 45], np.int32)).tolist()[:2] == [20, 45]

    def test_the_papers_visible_marker_makes_its_region_a_unit(self) -> None:
        preset, rng = PRESETS["paper"], np.random.default_rng(8)
        marker, region = visible_marker(preset, 8192), rng.integers(0, 8192, 300).astype(np.int32)
        cuts_at_the_end = 0
        for _ in range(40):
            before, after = (rng.integers(0, 8192, int(n)).astype(np.int32) for n in rng.integers(40, 600, 2))
            ids = np.concatenate((before, marker, region, marker, after))
            first = len(before) + len(marker)
            ends = set(cut(ids, preset).tolist())
            cuts_at_the_end += first in ends and first + len(region) + len(marker) in ends
        assert cuts_at_the_end >= 20, "only an earlier cut less than the minimum away may prevent it"

    @pytest.mark.parametrize("name", sorted(PRESETS))
    def test_an_edge_is_a_cut_in_every_preset(self, name: str) -> None:
        """Whether the template's edges are passed is the caller's choice (`structure_cuts`); markers always are."""
        ids = np.random.default_rng(2).integers(0, 1000, 2000).astype(np.int32)
        edges = np.array([300, 900, 1500], np.int32)
        assert set(edges.tolist()) <= set(cut(ids, PRESETS[name], edges).tolist())

    @settings(max_examples=60, deadline=None)
    @given(presets, st.integers(0, 700), st.integers(0, 2**32), st.data())
    def test_cuts_do_not_depend_on_the_position(
        self, preset: Preset, shift: int, seed: int, data: st.DataObject
    ) -> None:
        """Text behind other text is cut as it is alone, from the first common boundary on, and there soon is one."""
        rng = np.random.default_rng(seed)
        ids, front = (rng.integers(0, 129_280, n).astype(np.int32) for n in (12_000, shift))
        edges = draw_edges(data, len(ids))
        alone = set(cut(ids, preset, edges).tolist())
        behind = set((cut(np.concatenate((front, ids)), preset, edges + shift) - shift).tolist())
        common = min(c for c in alone & behind if c > preset.window)
        assert {c for c in alone if c >= common} == {c for c in behind if c >= common}
        assert common < 11_000

    def test_presets_refuse_contradictions(self) -> None:
        for numbers in [(16, 8, 64, 16, 256), (16, 4, 64, 16, 31), (16, 4, 8, 16, 256)]:
            with pytest.raises(ValueError, match="preset x"):
                Preset("x", *numbers, structure_cuts=True, extension=True, min_segment=1, s1_window=0)


class TestRecut:
    @settings(max_examples=300, deadline=None)
    @given(presets, prompts(2500), st.data())
    def test_equals_cut_after_any_edit(self, preset: Preset, old: np.ndarray, data: st.DataObject) -> None:
        """Random edits: a run removed, another put in its place, anywhere; edges move, appear and vanish."""
        n = len(old)
        a = data.draw(st.integers(0, n))
        b = data.draw(st.integers(a, n))
        new_part = data.draw(prompts(300))
        ids = np.concatenate((old[:a], new_part, old[b:]))
        old_edges = draw_edges(data, n)
        moved = np.where(old_edges >= b, old_edges + len(ids) - n, old_edges)
        gone = data.draw(st.integers(0, len(moved)))
        edges = np.union1d(np.delete(moved, slice(gone, gone + 1)), draw_edges(data, len(ids))).astype(np.int32)
        edges = moved.astype(np.int32) if data.draw(st.booleans()) else edges
        got = recut(old, cut(old, preset, old_edges), ids, preset, edges, old_edges)
        assert got.dtype == np.int32
        assert got.tolist() == cut(ids, preset, edges).tolist()

    @pytest.mark.parametrize("preset", ALL, ids=lambda p: p.name)
    def test_only_the_changed_part_is_hashed(self, preset: Preset, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(3)
        old = rng.integers(0, 129_280, 60_000).astype(np.int32)
        ends = cut(old, preset, None)
        hashed = []

        def counting(ids: np.ndarray, preset: Preset) -> np.ndarray:
            hashed.append(len(ids))
            return rolling_hash(ids, preset)

        monkeypatch.setattr("irminsul_backend.chunking.cutting.rolling_hash", counting)
        for ids in (
            np.concatenate((old, old[:100])),
            np.concatenate((old[:50], old[45:])),
            np.concatenate((old[:30_000], old[30_500:])),
        ):
            hashed.clear()
            got = recut(old, ends, ids, preset)
            assert sum(hashed) <= 20 * preset.maximum
            assert got.tolist() == cut(ids, preset, None).tolist()
