"""The command; see `--help`."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from irminsul_kernels.bench.report import Report, Row

PARTS = {
    "copy": "device copy bandwidth",
    "matmul": "bf16 matmul rate",
    "decode": "decode attention, what rotation costs, other libraries",
    "extend": "prefill of holes: absorbed and expanded, what rotation costs",
    "small": "norms, new rows, gate, sampling",
    "engine": "a model of DeepSeek-V2-Lite's shapes with random weights: time to first token, tokens/s, joules",
}
ENGINE_MODULE = "irminsul_backend.benchmarks.gpu_engine"
"""Has `run(report)`. It lies above this package, so it is looked for, not imported."""
ATTENTION = ("decode", "extend")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m irminsul_kernels.bench",
        description="Check the kernels against float64 on this machine's NVIDIA GPU and time them, in under 8 minutes.",
        epilog="parts: " + "; ".join(f"{name}: {about}" for name, about in PARTS.items()),
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE ('-': only JSON, to stdout)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="number of the GPU (default: 0)")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a kernel is wrong; 2 without a GPU."""
    args = build_parser().parse_args(argv)
    if not torch.cuda.is_available():
        print(f"irminsul_kernels.bench: torch {torch.__version__} sees no NVIDIA GPU; nothing was run", file=sys.stderr)
        return 2
    if not 0 <= args.device < torch.cuda.device_count():
        print(f"--device {args.device}: there are {torch.cuda.device_count()} GPUs, from 0", file=sys.stderr)
        return 2
    torch.cuda.set_device(args.device)
    report = run(args.only, torch.device("cuda", args.device))
    if args.json == "-":
        print(json.dumps(report.as_dict(), indent=1, ensure_ascii=False))
    else:
        print(report.text())
        if args.json:
            Path(args.json).write_text(json.dumps(report.as_dict(), indent=1, ensure_ascii=False), encoding="utf-8")
    return 1 if report.failed else 0


def run(parts: Sequence[str], device: torch.device) -> Report:
    """Run the parts, in the table's order. What cannot run here is skipped with a reason."""
    from irminsul_kernels.attention.mla_attention import KERNEL_ARCHITECTURES
    from irminsul_kernels.bench.timing import Ceilings, Timer, measure_copy, measure_matmul

    began = time.monotonic()
    report = Report(machine=describe(device))
    timer = Timer(device)
    copy_us, copy = measure_copy(timer, device)
    matmul_us, matmul = measure_matmul(timer, device)
    ceilings = Ceilings(copy, matmul)
    if "copy" in parts:
        report.rows.append(Row("copy", "device copy", "read + written", copy_us, copy, "GB/s"))
    if "matmul" in parts:
        report.rows.append(Row("matmul", "bf16 matmul", "8192 x 8192 x 8192", matmul_us, matmul, "TFLOP/s"))
    capability = torch.cuda.get_device_capability(device)
    work: dict[str, Callable[[], object]] = {}
    if set(parts) & {*ATTENTION, "small"}:
        try:
            from irminsul_kernels.bench import attention, small
        except ImportError as problem:
            report.skipped.append(("decode, extend, small", f"needs the triton package: {problem}"))
        else:
            work["check"] = lambda: attention.check(report, device)
            work["decode"] = lambda: attention.decode(report, timer, ceilings, device)
            work["extend"] = lambda: attention.extend_part(report, timer, ceilings, device)
            work["small"] = lambda: small.small(report, timer, ceilings, device)
    if set(parts) & set(ATTENTION):
        parts = ["check", *parts]
    for name in ("check", *ATTENTION, "small"):
        if name not in parts or name not in work:
            continue
        if name != "small" and capability not in KERNEL_ARCHITECTURES:
            supported = ", ".join(f"{a}.{b}" for a, b in KERNEL_ARCHITECTURES)
            report.skipped.append(
                (name, f"compute capability {capability[0]}.{capability[1]}; kernels fit {supported}")
            )
            continue
        _run_part(report, name, work[name])
    if "engine" in parts:
        _run_part(report, "engine", lambda: _engine(report))
    report.seconds = time.monotonic() - began
    return report


def _run_part(report: Report, name: str, part: Callable[[], object]) -> None:
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        part()
    except torch.cuda.OutOfMemoryError as problem:
        report.skipped.append((f"the rest of {name}", f"out of GPU memory: {str(problem).splitlines()[0]}"))
    torch.cuda.empty_cache()


def _engine(report: Report) -> None:
    try:
        module = importlib.import_module(ENGINE_MODULE)
    except ImportError as problem:
        report.skipped.append(("engine", f"irminsul is not installed: {problem}"))
        return
    module.run(report)


def describe(device: torch.device) -> dict[str, str]:
    """What a figure means nothing without."""
    found = torch.cuda.get_device_properties(device)
    versions = []
    for package in ("torch", "triton", "irminsul-kernels"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return {
        "GPU": f"{found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} "
        f"multiprocessors, {found.total_memory / 2**30:.0f} GiB",
        "versions": f"{', '.join(versions)}, CUDA {torch.version.cuda}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


if __name__ == "__main__":
    # the module that the parts import, not a second copy of it
    from irminsul_kernels.bench.__main__ import main as imported_main

    sys.exit(imported_main())
