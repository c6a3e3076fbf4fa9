"""`python -m irminsul_kernels.bench`: checks the kernels and times them; see `--help`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

import torch

from irminsul_kernels.bench import command
from irminsul_kernels.bench.report import Report, Row

PARTS = {
    "copy": "device copy bandwidth",
    "matmul": "bf16 matmul rate",
    "decode": "decode attention, the cost of rotation, other libraries",
    "extend": "prefill of holes: absorbed and expanded, the cost of rotation",
    "small": "norms, writing of new rows, SiLU gate, sampling",
}
ATTENTION = ("decode", "extend")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m irminsul_kernels.bench",
        description="Check the kernels against float64 on an NVIDIA GPU of this machine and time them.",
        epilog="parts: " + "; ".join(f"{name}: {about}" for name, about in PARTS.items()),
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 if a kernel is wrong; 2 without a GPU."""
    return command.run(build_parser(), argv, lambda args, report, device: measure(args.only, report, device))


def measure(parts: Sequence[str], report: Report, device: torch.device) -> None:
    """Run the parts, in the order of PARTS. A part that cannot run on this GPU is skipped, with the reason."""
    from irminsul_kernels.attention.mla_attention import KERNEL_ARCHITECTURES
    from irminsul_kernels.bench.timing import Ceilings, Timer, measure_copy, measure_matmul

    timer = Timer(device)
    copy_us, copy = measure_copy(timer, device)
    matmul_us, matmul = measure_matmul(timer, device)
    ceilings = Ceilings(copy, matmul)
    if "copy" in parts:
        report.rows.append(Row("copy", "device copy", "read + written", copy_us, copy, "GB/s"))
    if "matmul" in parts:
        report.rows.append(Row("matmul", "bf16 matmul", "8192 x 8192 x 8192", matmul_us, matmul, "TFLOP/s"))
    if not set(parts) & {*ATTENTION, "small"}:
        return
    try:
        from irminsul_kernels.bench import attention, small
    except ImportError as problem:
        report.skipped.append(("decode, extend, small", f"needs the triton package: {problem}"))
        return
    work: dict[str, Callable[[], object]] = {
        "check": lambda: attention.check(report, device),
        "decode": lambda: attention.decode(report, timer, ceilings, device),
        "extend": lambda: attention.extend_part(report, timer, ceilings, device),
        "small": lambda: small.small(report, timer, ceilings, device),
    }
    major, minor = torch.cuda.get_device_capability(device)
    for name, part in work.items():
        wanted = set(ATTENTION) if name == "check" else {name}
        if not wanted & set(parts):
            continue
        if name != "small" and (major, minor) not in KERNEL_ARCHITECTURES:
            supported = ", ".join(f"{a}.{b}" for a, b in KERNEL_ARCHITECTURES)
            report.skipped.append((name, f"compute capability {major}.{minor}; kernels fit {supported}"))
            continue
        command.run_part(report, name, part)


if __name__ == "__main__":
    sys.exit(main())
