"""What every GPU benchmark's command line has in common: the choice of a GPU, and a report as a table or as JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from irminsul_kernels.bench.report import Report

Measure = Callable[[argparse.Namespace, Report, torch.device], None]
"""Adds what it finds to the report."""


def run(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None, measure: Measure, packages: Sequence[str] = ()
) -> int:
    """Parse the arguments, measure on the chosen GPU and print the report.

    Args:
        parser: has the benchmark's own arguments; `--json` and `--device` are added here.
        argv: the arguments; None means those of the process.
        measure: called once, with the GPU as the current device.
        packages: distributions whose versions belong in the report, besides torch, triton and irminsul-kernels.

    Returns:
        Exit status: 0; 1 if a check failed; 2 if there is no such GPU.
    """
    parser.add_argument("--json", metavar="FILE", help="also write all figures to FILE ('-': only JSON, to stdout)")
    parser.add_argument("--device", type=int, default=0, metavar="N", help="index of the GPU (default: 0)")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        name = parser.prog.removeprefix("python -m ")
        print(f"{name}: torch {torch.__version__} sees no NVIDIA GPU; nothing was run", file=sys.stderr)
        return 2
    if not 0 <= args.device < torch.cuda.device_count():
        print(f"--device {args.device}: there are {torch.cuda.device_count()} GPUs, from 0", file=sys.stderr)
        return 2
    device = torch.device("cuda", args.device)
    torch.cuda.set_device(device)
    began = time.monotonic()
    report = Report(machine=describe(device, packages))
    measure(args, report, device)
    report.seconds = time.monotonic() - began
    figures = json.dumps(report.as_dict(), indent=1, ensure_ascii=False)
    print(figures if args.json == "-" else report.text())
    if args.json not in (None, "-"):
        Path(args.json).write_text(figures, encoding="utf-8")
    return 1 if report.failed else 0


def run_part(report: Report, name: str, part: Callable[[], object]) -> None:
    """Run one part and say so on stderr. A part that runs out of GPU memory is listed as skipped from there on."""
    print(f"{name} ...", file=sys.stderr, flush=True)
    try:
        part()
    except torch.cuda.OutOfMemoryError as problem:
        report.skipped.append((f"the rest of {name}", f"out of GPU memory: {str(problem).splitlines()[0]}"))
    torch.cuda.empty_cache()


def describe(device: torch.device, packages: Sequence[str] = ()) -> dict[str, str]:
    """GPU, versions and date, without which a figure means nothing."""
    found = torch.cuda.get_device_properties(device)
    versions = []
    for package in ("torch", "triton", "irminsul-kernels", *packages):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{package} {importlib.metadata.version(package)}")
    return {
        "GPU": f"{found.name}, compute capability {found.major}.{found.minor}, {found.multi_processor_count} "
        f"multiprocessors, {found.total_memory / 2**30:.0f} GiB",
        "versions": f"{', '.join(versions)}, CUDA {torch.version.cuda}",
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }
