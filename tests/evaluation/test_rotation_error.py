"""Each way of moving a row has the error that its roundings explain; a wrong rotation shows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from irminsul_kernels import rotate

from irminsul_backend.evaluation import rotation_error as rotation
from irminsul_backend.hub.config_fields import FieldReader
from irminsul_backend.model.rope import read_rope

ROWS = 256
BOUNDS = {
    "fresh": (1.6e-3, 1.7e-3),
    "on_load": (1.6e-3, 1.7e-3),
    "on_load_1000": (1.6e-3, 1.7e-3),
    "rounded": (2.2e-3, 2.5e-3),
    "bf16": (3.0e-3, 3.4e-3),
    "in_place_9": (5.0e-3, 5.5e-3),
    "in_place_1000": (4.8e-2, 5.7e-2),
}
"""Relative L2; one rounding to bf16 costs 1.66e-3, and independent ones add as squares."""


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    done: list[int] = []
    found = rotation.measure(ROWS, on_done=done.append)
    assert sum(done) == len(rotation.ROPES) * rotation.MANY_MOVES
    return found


@pytest.mark.parametrize("rope", ["plain", "yarn"])
class TestErrors:
    @pytest.mark.parametrize("way", list(BOUNDS))
    def test_size(self, result: dict[str, Any], rope: str, way: str) -> None:
        low, high = BOUNDS[way]
        assert low <= result["ropes"][rope][way]["relative_l2"] <= high

    def test_every_way_has_bounds(self, result: dict[str, Any], rope: str) -> None:
        assert set(result["ropes"][rope]) == set(BOUNDS) == set(rotation.WAYS)

    def test_worst_row_and_scores(self, result: dict[str, Any], rope: str) -> None:
        for errors in result["ropes"][rope].values():
            assert errors["relative_l2"] < errors["worst_row_relative_l2"] < 3 * errors["relative_l2"]
            assert 0 < errors["max_score_error"] < 10 * errors["relative_l2"]

    def test_float64_rotations_compose(self, rope: str) -> None:
        read = read_rope(FieldReader(rotation.ROPES[rope]), rotation.DIM)
        x = torch.randn(64, rotation.DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        at, delta = torch.randint(-65536, 65536, (2, 64), generator=torch.Generator().manual_seed(2))
        twice = rotation.rotate_exact(read, rotation.rotate_exact(read, x, at), delta)
        torch.testing.assert_close(twice, rotation.rotate_exact(read, x, at + delta), atol=1e-10, rtol=0)


def test_moving_often_equals_moving_once(result: dict[str, Any]) -> None:
    assert result["moved_often_equals_moved_once"] is True
    assert result["met"] is True


def test_the_sample_reaches_the_farthest_distance_and_never_passes_it() -> None:
    rope = read_rope(FieldReader(rotation.ROPES["plain"]), rotation.DIM)
    rows = rotation._sample(rope, 16, torch.Generator().manual_seed(0))
    deltas = torch.cat(((rows.stops[-1] - rows.base)[None], rows.stops - rows.base, rows.stops.diff(dim=0))).abs()
    assert deltas.max() == rotation.FARTHEST
    assert (rows.stops[-1] - rows.base)[:2].tolist() == [rotation.FARTHEST, -rotation.FARTHEST]


def test_a_wrong_rotation_misses_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotation, "rotate", lambda x, cos, sin: rotate(x, cos, -sin))
    assert rotation.measure(16)["met"] is False
