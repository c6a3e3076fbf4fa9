"""RMSNorm and the write of new rows against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from irminsul_kernels import cos_sin, turns_per_position

pytest.importorskip("triton")
from irminsul_kernels.ops.norm import rms_norm, write_rows

DTYPES = {torch.bfloat16: 2.3e-3, torch.float16: 3e-4, torch.float32: 1e-6}
"""Relative L2 error of one rounding to the type."""


def relative_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_rms_norm(dtype: torch.dtype, size: int) -> None:
    x = random(5, size + 7, dtype=dtype)[:, 3 : 3 + size]
    weight = random(size, dtype=dtype, seed=2)
    exact = F.rms_norm(x.double(), (size,), weight.double(), 1e-6)
    assert relative_error(rms_norm(x, weight, 1e-6), exact) < DTYPES[dtype]


def check_write_rows(dtype: torch.dtype, rank: int, rope: int) -> None:
    """Rows that are not named keep their NaN, and the neighbours in `kv` are not read."""
    tokens, capacity = 6, 20
    wide = torch.full((tokens, rank + rope + 11), float("nan"), dtype=dtype)
    wide[:, 5 : 5 + rank + rope] = random(tokens, rank + rope, dtype=dtype)
    kv, weight = wide[:, 5 : 5 + rank + rope], random(rank, dtype=dtype, seed=2)
    inv_freq = 10000.0 ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
    positions = torch.tensor([0, 1, 5, 77, 4096, 131071])
    cos, sin = (t * 1.1 for t in cos_sin(positions, turns_per_position(inv_freq)))
    slots = torch.tensor([19, 0, 7, 3, 8, 4], dtype=torch.int32)
    rows = torch.full((capacity, rank + rope), float("nan"), dtype=dtype)
    write_rows(kv, weight, cos, sin, slots, rows, 1e-6)

    latent = F.rms_norm(kv[:, :rank].double(), (rank,), weight.double(), 1e-6)
    angle = positions.double()[:, None] * inv_freq
    low, high = kv[:, rank:].double().chunk(2, dim=1)
    moved = torch.cat((low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()), dim=1)
    written = rows[slots.long()]
    assert relative_error(written[:, :rank], latent) < DTYPES[dtype]
    assert relative_error(written[:, rank:], 1.1 * moved) < DTYPES[dtype]
    others = [s for s in range(capacity) if s not in slots.tolist()]
    assert rows[others].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 2048])
def test_rms_norm_in_torch(dtype: torch.dtype, size: int) -> None:
    check_rms_norm(dtype, size)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (48, 24)])
def test_write_rows_in_torch(dtype: torch.dtype, rank: int, rope: int) -> None:
    check_write_rows(dtype, rank, rope)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 48, 2048])
def test_rms_norm_kernel(dtype: torch.dtype, size: int) -> None:
    check_rms_norm(dtype, size)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (48, 24)])
def test_write_rows_kernel(dtype: torch.dtype, rank: int, rope: int) -> None:
    check_write_rows(dtype, rank, rope)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(kv=torch.zeros(2, 13)), "R \\+ d = 8 \\+ 4 wide"),
        (dict(weight=torch.zeros(8).half()), "weight torch.float16"),
        (dict(cos=torch.zeros(3, 2)), "cos is torch.float32 \\(3, 2\\)"),
        (dict(sin=torch.zeros(2, 2).double()), "sin is torch.float64"),
        (dict(slots=torch.zeros(2)), "slots are torch.float32"),
        (dict(rows=torch.zeros(4, 12).half()), "rows are torch.float16"),
        (dict(rows=torch.zeros(4, 24)[:, ::2]), "contiguous"),
        (dict(rows=torch.zeros(4, 12, device="meta")), "one device"),
        (dict(kv=torch.zeros(12, 2).T), "last stride must be 1"),
    ],
)
def test_wrong_input_names_itself(change: dict, message: str) -> None:
    arguments = dict(kv=torch.zeros(2, 12), weight=torch.zeros(8), cos=torch.zeros(2, 2), sin=torch.zeros(2, 2))
    arguments |= dict(slots=torch.zeros(2, dtype=torch.int32), rows=torch.zeros(4, 12), eps=1e-6)
    with pytest.raises(ValueError, match=message):
        write_rows(**{**arguments, **change})
