"""The small kernels: norms, writing of new rows, SiLU gate, sampling; most of them compared with torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from irminsul_kernels.bench.attention import error
from irminsul_kernels.bench.report import Check, Report, Row
from irminsul_kernels.bench.scenes import RANK, ROPE
from irminsul_kernels.bench.timing import Ceilings, Timer
from irminsul_kernels.ops.activation import silu_gate, silu_gate_reference
from irminsul_kernels.ops.norm import rms_norm, rms_norm_reference, write_rows, write_rows_reference
from irminsul_kernels.ops.rotation import rotate
from irminsul_kernels.ops.sampling import sample
from irminsul_kernels.ops.sampling_reference import sample_reference

TOKENS, HIDDEN, INNER, BATCH, VOCAB = 4096, 2048, 1408, 64, 102_400
EPS = 1e-6
LIMIT = 2e-3


def small(report: Report, timer: Timer, ceilings: Ceilings, device: torch.device) -> None:
    """Check and time all of them; rates count each element that must be moved once."""
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).bfloat16()

    def add(name: str, case: str, size: int, run: Callable[[], Any]) -> None:
        us = timer.median_us(run)
        rate = size / us / 1e3
        report.rows.append(Row("small", name, case, us, rate, "GB/s", rate / ceilings.copy))

    x, weight = random(TOKENS, HIDDEN), random(HIDDEN)
    exact = rms_norm_reference(x.double(), weight.double(), EPS)
    report.checks.append(Check("RMSNorm", error(rms_norm(x, weight, EPS), exact), LIMIT))
    case, size = f"{TOKENS} tokens of {HIDDEN}", 4 * x.numel()
    add("RMSNorm", case, size, lambda: rms_norm(x, weight, EPS))
    add("torch rms_norm", case, size, lambda: F.rms_norm(x, (HIDDEN,), weight, EPS))

    kv, norm = random(TOKENS, RANK + ROPE), random(RANK)
    angle = torch.rand(TOKENS, ROPE // 2, generator=generator, device=device) * 6.28
    cos, sin = angle.cos(), angle.sin()
    slots = torch.randperm(2 * TOKENS, generator=generator, device=device)[:TOKENS].int()
    rows = torch.zeros(2 * TOKENS, RANK + ROPE, dtype=kv.dtype, device=device)
    exact = torch.zeros_like(rows, dtype=torch.float64)
    write_rows_reference(kv.double(), norm.double(), cos, sin, slots, exact, EPS)
    write_rows(kv, norm, cos, sin, slots, rows, EPS)
    report.checks.append(Check("new rows into their slots", error(rows, exact), LIMIT))

    def by_torch() -> None:
        latent = F.rms_norm(kv[:, :RANK], (RANK,), norm, EPS)
        rows[slots.long()] = torch.cat((latent, rotate(kv[:, RANK:], cos, sin).to(kv.dtype)), dim=1)

    case, size = f"{TOKENS} rows of {RANK} + {ROPE}", 4 * kv.numel() + 8 * angle.numel() + 4 * TOKENS
    add("norm, rotation and write of new rows", case, size, lambda: write_rows(kv, norm, cos, sin, slots, rows, EPS))
    add("the same by torch", case, size, by_torch)

    gate_up = random(TOKENS, 2 * INNER)
    report.checks.append(Check("SiLU gate", error(silu_gate(gate_up), silu_gate_reference(gate_up.double())), LIMIT))
    case, size = f"{TOKENS} tokens of {INNER}", 3 * gate_up.numel()
    add("SiLU gate", case, size, lambda: silu_gate(gate_up))
    add("torch silu and product", case, size, lambda: F.silu(gate_up[:, :INNER]) * gate_up[:, INNER:])

    logits = torch.randn(BATCH, VOCAB, generator=generator, device=device) * 3
    for name, top_k, top_p in (("sampling, temperature", 0, 1.0), ("sampling, top-k 40, top-p 0.9", 40, 0.9)):
        settings = dict(
            temperature=torch.full((BATCH,), 0.8, device=device),
            top_k=torch.full((BATCH,), top_k, dtype=torch.int32, device=device),
            top_p=torch.full((BATCH,), top_p, device=device),
            min_p=torch.zeros(BATCH, device=device),
            seeds=torch.arange(BATCH, device=device),
            draws=torch.arange(BATCH, device=device),
        )
        agree = (sample(logits, **settings) == sample_reference(logits, **settings)).double().mean().item()
        # one of 64 may lie on an edge of top-p that fp32 and float64 put a token apart
        report.checks.append(Check(f"{name}: tokens that differ from the sort's", 1 - agree, 1.5 / BATCH))
        run = lambda s=settings: sample(logits, **s)  # noqa: E731
        add(name, f"{BATCH} rows of {VOCAB}", 4 * logits.numel(), run)
