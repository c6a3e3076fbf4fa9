"""Attention: decode and extend against float64 and against the device's limits, and the cost of rotation."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from irminsul_kernels.attention.decode import aot_configs as decode_configs
from irminsul_kernels.attention.decode import decode_attention, tuning
from irminsul_kernels.attention.expanded import expanded, expanded_reference
from irminsul_kernels.attention.extend import aot_configs as extend_configs
from irminsul_kernels.attention.extend import extend, extend_reference
from irminsul_kernels.attention.plans import chunk_keys, plan_expanded, plan_extend, plan_splits, workspace_size
from irminsul_kernels.bench import scenes
from irminsul_kernels.bench.peers import ADAPTERS
from irminsul_kernels.bench.report import Bar, Check, Report, Row
from irminsul_kernels.bench.scenes import NOPE, RANK, ROPE, SCALE, VALUE, Scene, make_scene
from irminsul_kernels.bench.timing import Ceilings, Timer
from irminsul_kernels.device import architecture, multiprocessors
from irminsul_kernels.launch import KernelConfig

LIMIT = 2e-3
"""Relative L2 error in bf16."""
DECODE_CASES = ((16, 1, 8192), (16, 1, 131_072), (16, 8, 8192), (16, 64, 8192), (128, 64, 8192))
"""Heads, batch, keys of each sequence."""
BAR_CASE = (16, 64, 8192)
CONTEXT, HEADS = 16_384, 16
SAME, RUNS, EACH = scenes.PATTERNS


def error(found: Tensor, exact: Tensor) -> float:
    """Relative L2 distance, in float64."""
    exact = exact.double().cpu()
    return float((found.double().cpu() - exact).norm() / exact.norm())


def weights(heads: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """w_uk [heads, NOPE, RANK] and w_uv [heads, RANK, VALUE]."""
    generator = torch.Generator(device).manual_seed(heads)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * RANK**-0.5).bfloat16()

    return random(heads, NOPE, RANK), random(heads, RANK, VALUE)


def check(
    report: Report,
    device: torch.device,
    lengths: Sequence[int] = (700, 1, 3000, 129),
    head_counts: Sequence[int] = (16, 128),
) -> None:
    """Ragged lengths, |δ| up to 131,072 in runs and row by row, NaN in every unused slot."""
    scene = make_scene(lengths, device)
    host = {name: getattr(scene, name).cpu() for name in ("rows", "slots", "turns")}
    heads = head_counts[0]
    # the end of a prompt, its start and its end, and every third token
    new = [np.r_[max(0, n - 100) : n] if i % 2 else np.r_[0 : n // 9, n - 1] for i, n in enumerate(lengths)]
    new[-1] = np.r_[0 : lengths[-1] : 3]
    for pattern in (RUNS, EACH):
        base = scene.bases[pattern]
        for count in head_counts:
            q_latent, q_rope = scene.queries(len(lengths), count, RANK, ROPE)
            found, _ = decode_attention(
                q_latent,
                q_rope,
                scene.rows,
                base,
                scene.slots,
                scene.kv_indptr,
                scene.turns,
                SCALE,
                max_length=max(lengths),
            )
            last = [np.array([n - 1]) for n in lengths]
            exact = _extend_reference(host, scene, base, q_latent, q_rope, last)
            report.checks.append(Check(f"decode, {count} heads, {pattern}", error(found, exact), LIMIT))
        tokens = sum(map(len, new))
        positions = torch.from_numpy(np.concatenate(new).astype(np.int32)).to(device)
        spans = _spans(new, scene)
        q_latent, q_rope = scene.queries(tokens, heads, RANK, ROPE)
        pool = (scene.rows, scene.slots, positions, base, scene.turns)
        plan = plan_extend(spans, tokens, heads, device, multiprocessors(device))
        found = extend(q_latent, q_rope, *pool, plan, SCALE)
        exact = _extend_reference(host, scene, base, q_latent, q_rope, new)
        report.checks.append(Check(f"extend, absorbed, {pattern}", error(found, exact), LIMIT))
        q_nope, q_rope = scene.queries(tokens, heads, NOPE, ROPE)
        w_uk, w_uv = weights(heads, device)
        found = expanded(q_nope, q_rope, *pool, w_uk, w_uv, plan_expanded(spans, tokens, 1024, device), SCALE)
        exact = expanded_reference(
            q_nope.cpu(), q_rope.cpu(), host["rows"], host["slots"], spans, base.cpu(), host["turns"], w_uk.cpu(),
            w_uv.cpu(), SCALE,
        )  # fmt: skip
        report.checks.append(Check(f"extend, expanded, {pattern}", error(found, exact), LIMIT))


def _spans(new: list[np.ndarray], scene: Scene) -> list[tuple[int, int, np.ndarray]]:
    firsts = np.cumsum([0, *map(len, new)])
    return [(int(f), s, p.astype(np.int64)) for f, s, p in zip(firsts, scene.first_slots, new, strict=False)]


def _extend_reference(
    host: dict[str, Tensor], scene: Scene, base: Tensor, q_latent: Tensor, q_rope: Tensor, new: list[np.ndarray]
) -> Tensor:
    positions = torch.from_numpy(np.concatenate(new))
    return extend_reference(
        q_latent.cpu(), q_rope.cpu(), host["rows"], host["slots"], positions, _spans(new, scene), base.cpu(),
        host["turns"], SCALE,
    )  # fmt: skip


def decode(report: Report, timer: Timer, ceilings: Ceilings, device: torch.device) -> None:
    """Decode by batch and length, the cost of rotation, and other libraries on the same rows."""
    for heads, batch, keys in DECODE_CASES:
        case = f"{heads} heads, batch {batch}, {keys} keys"
        scene = make_scene([keys] * batch, device)
        q_latent, q_rope = scene.queries(batch, heads, RANK, ROPE)
        run = DecodeRun(scene, q_latent, q_rope)
        size = scenes.decode_bytes(batch, heads, scene.keys)

        def add(name: str, us: float, note: str = "", case: str = case, size: int = size) -> None:
            rate = size / us / 1e3
            report.rows.append(Row("decode", name, case, us, rate, "GB/s", rate / ceilings.copy, note))

        for pattern in scenes.PATTERNS:
            add(f"decode, {pattern}", timer.median_us(run.whole(pattern)))
        plain = timer.median_us(run.kernel_alone(SAME, rotate=False))
        add("main kernel without rotation", plain)
        for pattern in scenes.PATTERNS:
            us = timer.median_us(run.kernel_alone(pattern, rotate=True))
            add(f"main kernel, {pattern}", us, f"rotation costs {us / plain - 1:+.1%}")
            if (heads, batch, keys) == BAR_CASE and pattern == RUNS:
                text = "rotation by runs on top of decode, 16 heads, batch 64, 8k keys (<= 3 %)"
                report.bars.append(Bar(text, us / plain - 1, 0.03, False, _for_h200(device)))
        if (heads, batch, keys) == BAR_CASE:
            whole = report.find("decode", f"decode, {RUNS}", case)
            share = None if whole is None else whole.share
            text = "decode, share of copy bandwidth, same case, δ per run (>= 0.8)"
            report.bars.append(Bar(text, share, 0.8, True, _for_h200(device)))
        exact = run.whole(SAME)()
        _peers(report, timer, scene, q_latent, q_rope, exact, add)


def _for_h200(device: torch.device) -> str:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "no GPU"
    return "" if "H200" in name else f"the bar is for an H200, this is {name}"


def _peers(
    report: Report,
    timer: Timer,
    scene: Scene,
    q_latent: Tensor,
    q_rope: Tensor,
    exact: Tensor,
    add: Callable[[str, float, str], None],
) -> None:
    for name, (package, adapt) in ADAPTERS.items():
        what = f"{name}, {q_latent.shape[1]} heads, batch {len(scene.lengths)}, {scene.lengths[0]} keys"
        if importlib.util.find_spec(package) is None:
            if (name, "not installed") not in report.skipped:
                report.skipped.append((name, "not installed"))
            continue
        try:
            call = adapt(scene, q_latent, q_rope)
            distance = error(call(), exact)
            us = timer.median_us(call)
        except Exception as problem:  # a library of any version: what it raises must not end the run
            report.skipped.append((what, f"{type(problem).__name__}: {str(problem)[:100]!r}"))
            continue
        if distance < 0.02:
            add(name, us, "no δ")
        else:
            report.skipped.append((what, f"its output differs from ours by {distance:.1e}"))


class DecodeRun:
    """Calls of decode on one scene, with everything allocated beforehand."""

    def __init__(self, scene: Scene, q_latent: Tensor, q_rope: Tensor) -> None:
        self.scene, self.q_latent, self.q_rope = scene, q_latent, q_rope
        batch, self.heads, rank = q_latent.shape
        device = q_latent.device
        arch, longest = architecture(device), max(scene.lengths)
        self.tune = tuning(rank, arch)
        self.splits = plan_splits(batch, self.heads, longest, multiprocessors(device), self.tune)
        self.longest = longest
        self.workspace = torch.empty(max(1, workspace_size(batch, self.heads, rank, self.splits)), device=device)
        self.out = torch.empty_like(q_latent)
        self.lse = torch.empty(batch, self.heads, device=device)
        self.parts = torch.empty(self.splits, batch, self.heads, rank, device=device)
        self.part_lse = torch.empty(self.splits, batch, self.heads, device=device)
        self.config = find_config(decode_configs(arch), R=RANK, D=ROPE, BLOCK_H=self.tune.block_h)

    def whole(self, pattern: str) -> Callable[[], Tensor]:
        """The wrapper: kernel and merge."""
        s = self.scene

        def run() -> Tensor:
            return decode_attention(
                self.q_latent, self.q_rope, s.rows, s.bases[pattern], s.slots, s.kv_indptr, s.turns, SCALE,
                max_length=self.longest, out=self.out, lse=self.lse, workspace=self.workspace, num_splits=self.splits,
            )[0]  # fmt: skip

        return run

    def kernel_alone(self, pattern: str, rotate: bool) -> Callable[[], Any]:
        """The main kernel as it is shipped, or compiled without rotation."""
        s = self.scene
        given = dict(
            q_latent=self.q_latent, q_rope=self.q_rope, rows=s.rows, base=s.bases[pattern], slots=s.slots,
            kv_indptr=s.kv_indptr, turns=s.turns, out=self.parts, lse=self.part_lse, scale=SCALE, heads=self.heads,
            num_splits=self.splits,
        )  # fmt: skip
        grid = (-(-self.heads // self.tune.block_h), self.splits, len(s.lengths))
        return lambda: launch(self.config, grid, given, rotate)


def find_config(configs: list[KernelConfig], **constexprs: int) -> KernelConfig:
    """The shipped bf16 configuration with these constants that can also be compiled without rotation.

    Raises:
        LookupError: there is none.
    """
    for config in configs:
        if config.unrotated and config.signature["rows"] == "*bf16" and constexprs.items() <= config.constexprs.items():
            return config
    raise LookupError(f"no configuration with {constexprs}; there are {', '.join(c.name for c in configs)}")


def launch(config: KernelConfig, grid: tuple[int, ...], given: dict[str, Any], rotate: bool) -> None:
    """Run a configuration as its file ships it, or with rotation compiled out."""
    constexprs = config.constexprs if rotate else config.constexprs | config.unrotated
    config.kernel[grid](**given, **constexprs, num_warps=config.num_warps, num_stages=config.num_stages)


def extend_part(report: Report, timer: Timer, ceilings: Ceilings, device: torch.device) -> None:
    """Prefill of 16k tokens whole, of its last 2,048, and short extends, 16 heads."""
    scene = make_scene([CONTEXT], device)
    for tokens in (CONTEXT, 2048):
        _expanded_case(report, timer, ceilings, scene, np.arange(CONTEXT - tokens, CONTEXT))
    for tokens in (16, 128):
        _absorbed_case(report, timer, ceilings, scene, np.arange(CONTEXT - tokens, CONTEXT))
    holes = np.concatenate([np.arange(at, at + 16) for at in range(1000, CONTEXT, 2048)])
    _absorbed_case(report, timer, ceilings, scene, holes, "8 holes of 16 tokens")


def _row(report: Report, ceilings: Ceilings, name: str, case: str, us: float, flops: int, note: str = "") -> Row:
    rate = flops / us / 1e6
    row = Row("extend", name, case, us, rate, "TFLOP/s", rate / ceilings.matmul, note)
    report.rows.append(row)
    return row


def _expanded_case(report: Report, timer: Timer, ceilings: Ceilings, scene: Scene, positions: np.ndarray) -> None:
    device, tokens = scene.rows.device, len(positions)
    case = f"{HEADS} heads, {tokens} new of {CONTEXT}"
    q_nope, q_rope = scene.queries(tokens, HEADS, NOPE, ROPE)
    w_uk, w_uv = weights(HEADS, device)
    plan = plan_expanded([(0, 0, positions)], tokens, chunk_keys(HEADS, NOPE, VALUE), device)
    at = torch.from_numpy(positions.astype(np.int32)).to(device)
    out = torch.empty(tokens, HEADS, VALUE, dtype=q_nope.dtype, device=device)
    flops = scenes.expanded_flops(HEADS, scenes.causal_pairs(positions), CONTEXT)
    for pattern, base in scene.bases.items():

        def run(base: Tensor = base) -> Tensor:
            pool = (scene.rows, scene.slots, at, base, scene.turns)
            return expanded(q_nope, q_rope, *pool, w_uk, w_uv, plan, SCALE, out)

        row = _row(report, ceilings, f"extend, expanded, {pattern}", case, timer.median_us(run), flops)
        if tokens == CONTEXT and pattern == RUNS:
            text = "extend at 16k, share of the bf16 matmul rate (>= 0.5)"
            report.bars.append(Bar(text, row.share, 0.5, True, _for_h200(device)))
    keys, values = (torch.randn(1, HEADS, CONTEXT, n, dtype=q_nope.dtype, device=device) for n in (NOPE + ROPE, VALUE))
    query = torch.cat((q_nope, q_rope), dim=2).transpose(0, 1)[None].contiguous()
    if tokens == CONTEXT:
        try:
            us = timer.median_us(
                lambda: F.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=SCALE)
            )
        except RuntimeError as problem:
            report.skipped.append((f"torch SDPA, {case}", str(problem).splitlines()[0]))
            return
        alone = 2 * HEADS * (NOPE + ROPE + VALUE) * scenes.causal_pairs(positions)
        _row(report, ceilings, "torch SDPA", case, us, alone, "keys and values expanded beforehand")


def _absorbed_case(
    report: Report, timer: Timer, ceilings: Ceilings, scene: Scene, positions: np.ndarray, what: str = ""
) -> None:
    device, tokens = scene.rows.device, len(positions)
    case = f"{HEADS} heads, {what or f'{tokens} new'} of {CONTEXT}"
    q_latent, q_rope = scene.queries(tokens, HEADS, RANK, ROPE)
    plan = plan_extend([(0, 0, positions)], tokens, HEADS, device, multiprocessors(device))
    at = torch.from_numpy(positions.astype(np.int32)).to(device)
    out = torch.empty_like(q_latent)
    flops = scenes.absorbed_flops(HEADS, scenes.causal_pairs(positions))
    for pattern, base in scene.bases.items():

        def run(base: Tensor = base) -> Tensor:
            return extend(q_latent, q_rope, scene.rows, scene.slots, at, base, scene.turns, plan, SCALE, out)

        _row(report, ceilings, f"extend, absorbed, {pattern}", case, timer.median_us(run), flops)
    try:
        config = find_config(extend_configs(architecture(device)), HEADS=HEADS, RANK=RANK, PAIRS=plan.pairs)
    except LookupError as problem:
        report.skipped.append((f"extend without rotation, {case}", str(problem)))
        return
    partial = torch.empty(plan.num_partials, plan.pairs, RANK, device=device)
    lse = torch.empty(plan.num_partials, plan.pairs, device=device)
    given = dict(
        q_latent=q_latent, q_rope=q_rope, rows=scene.rows, slots=scene.slots, q_positions=at, base=scene.bases[SAME],
        turns=scene.turns, pieces=plan.pieces, out=out, partial=partial, lse=lse, scale=SCALE,
    )  # fmt: skip
    grid = (2 * triton.cdiv(HEADS, config.constexprs["BLOCK_HEADS"]), len(plan.pieces))
    plain = timer.median_us(lambda: launch(config, grid, given, rotate=False))
    _row(report, ceilings, "main kernel without rotation", case, plain, flops)
    for pattern, base in scene.bases.items():
        moved = given | dict(base=base)
        us = timer.median_us(lambda moved=moved: launch(config, grid, moved, rotate=True))  # type: ignore[misc]
        _row(report, ceilings, f"main kernel, {pattern}", case, us, flops, f"rotation costs {us / plain - 1:+.1%}")
