"""Compile every kernel ahead of time, without a GPU, and report the resources and instructions it takes.

    python -m irminsul_kernels.tools.aot [--arch 80 90 100] [--kernel decode] [--json]

`aot_configs(arch) -> list[KernelConfig]` of a kernel file lists what it launches on that architecture. Each is compiled
by Triton and disassembled; the table shows registers, spills, stack, shared memory, and the instructions that one
iteration of the main loop (the loop with the most matrix instructions) executes at least and at most: on its shortest
and on its longest path. If a kernel rotates rows, the same configuration is compiled without rotation too, and the
table shows the cost of rotation on both paths.

Needs the `triton` package, no GPU. Does not work under TRITON_INTERPRET=1.
"""

from __future__ import annotations

import argparse
import importlib
import json
import pkgutil
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from irminsul_kernels import attention, ops
from irminsul_kernels.launch import KernelConfig
from irminsul_kernels.tools.sass import disassemble, main_loop

ARCHITECTURES = (80, 90, 100)
SHARED_LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory one block may have, by compute capability (CUDA programming guide)."""


@dataclass(frozen=True)
class Report:
    """Resources and instructions of one compiled configuration."""

    name: str
    arch: int
    registers: int
    """Registers per thread."""
    spills: int
    """Instructions that store to or load from local memory."""
    stack: int
    """Bytes per thread."""
    shared: int
    """Bytes per block."""
    shared_limit: int
    loop_least: int
    """Instructions on the shortest and on the longest path through the main loop; 0 without a loop."""
    loop_most: int
    global_loads_least: int
    global_loads_most: int
    """LDG instructions on these paths; asynchronous copies are not counted."""
    matrix_products: int
    """Tensor-core instructions on the longest path."""
    wide_copies: int
    """16-byte asynchronous copies in the whole kernel."""
    unrotated_least: int | None
    unrotated_most: int | None
    """The same paths of the same configuration without rotation; None if the kernel does not rotate."""

    @property
    def rotation_cost(self) -> float | None:
        """Instructions that rotation adds to the shortest path through the main loop, as a share."""
        return self.loop_least / self.unrotated_least - 1 if self.unrotated_least else None

    @property
    def rotation_cost_most(self) -> float | None:
        """The same for the longest path."""
        return self.loop_most / self.unrotated_most - 1 if self.unrotated_most else None


def inspect(config: KernelConfig, arch: int) -> Report:
    """Compile `config` for compute capability `arch` (80: 8.0) and read the machine code.

    Raises:
        ValueError: the limits of this architecture are not known.
    """
    if arch not in SHARED_LIMITS:
        raise ValueError(f"arch {arch}: known are {', '.join(map(str, SHARED_LIMITS))}")
    unrotated = None
    if config.unrotated:
        plain = replace(config, constexprs=config.constexprs | config.unrotated, unrotated={})
        unrotated = inspect(plain, arch)
    compiled = compile_config(config, arch)
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(compiled.asm["cubin"])
        listing = _cuobjdump(cubin)
    resources = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", listing)}
    code = disassemble(listing)
    least, most = main_loop(code)
    return Report(
        name=config.name,
        arch=arch,
        registers=resources["REG"],
        spills=sum(i.opcode.split(".")[0] in ("STL", "LDL") for i in code),
        stack=resources["STACK"] + resources.get("LOCAL", 0),
        shared=compiled.metadata.shared,
        shared_limit=SHARED_LIMITS[arch],
        loop_least=len(least),
        loop_most=len(most),
        global_loads_least=sum(i.opcode.startswith("LDG.") for i in least),
        global_loads_most=sum(i.opcode.startswith("LDG.") for i in most),
        matrix_products=sum(i.is_matrix_product for i in most),
        wide_copies=sum(i.opcode.startswith("LDGSTS") and ".128" in i.opcode for i in code),
        unrotated_least=unrotated.loop_least if unrotated else None,
        unrotated_most=unrotated.loop_most if unrotated else None,
    )


def compile_config(config: KernelConfig, arch: int) -> Any:
    """Triton's compiled kernel; Triton caches it on disk.

    Raises:
        ValueError: an argument of the kernel has no type or value.
        RuntimeError: TRITON_INTERPRET is set, so there is nothing to compile.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = config.kernel
    if not isinstance(kernel, triton.JITFunction):
        raise RuntimeError(f"{config.name}: compiling needs a process without TRITON_INTERPRET=1")
    missing = set(kernel.arg_names) - set(config.signature) - set(config.constexprs)
    if missing:
        raise ValueError(f"{config.name}: no type or value for {', '.join(sorted(missing))}")
    source = ASTSource(
        kernel,
        signature={name: config.signature.get(name, "constexpr") for name in kernel.arg_names},
        constexprs={(kernel.arg_names.index(name),): value for name, value in config.constexprs.items()},
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in config.aligned},
    )
    options = dict(num_warps=config.num_warps, num_stages=config.num_stages)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _cuobjdump(cubin: Path) -> str:
    """Resource usage, then the machine code."""
    from triton import knobs

    command = [knobs.nvidia.cuobjdump.path, "-res-usage", "-sass", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def all_configs(arch: int, only: str | None = None) -> list[KernelConfig]:
    """The configurations that every kernel file, or only the one named `only`, launches on `arch`."""
    configs: list[KernelConfig] = []
    for room in (attention, ops):
        for info in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
            if only is not None and info.name.rpartition(".")[2] != only:
                continue
            module = importlib.import_module(info.name)
            if hasattr(module, "aot_configs"):
                configs += module.aot_configs(arch)
    return configs


def table(reports: list[Report]) -> str:
    """One line per report."""
    width = max(len(r.name) for r in reports)
    lines = [
        f"{'':{width}}       per thread              KB per block   instructions of the main loop: least/most"
        "                 wide",
        f"{'kernel':{width}}   sm  registers spills stack  shared/limit  unrotated   rotated       rotation costs"
        "  LDG    copies",
    ]
    for r in reports:
        plain = "-" if r.unrotated_least is None else f"{r.unrotated_least}/{r.unrotated_most}"
        cost = "-"
        if r.rotation_cost is not None and r.rotation_cost_most is not None:
            cost = f"{100 * r.rotation_cost:+.1f}/{100 * r.rotation_cost_most:+.1f} %"
        lines.append(
            f"{r.name:{width}}  {r.arch:3}  {r.registers:9} {r.spills:6} {r.stack:5}"
            f"   {r.shared / 1024:5.1f}/{r.shared_limit / 1024:5.1f}  {plain:>9}  {r.loop_least:4}/{r.loop_most:<4}"
            f"  {cost:>17}  {r.global_loads_least:2}/{r.global_loads_most:<2}  {r.wide_copies:6}"
        )
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Returns 1 if a kernel spills or needs more shared memory than the device has."""
    parser = argparse.ArgumentParser(
        prog="python -m irminsul_kernels.tools.aot", description=(__doc__ or "").split("\n")[0]
    )
    about = "compute capabilities, 90 for 9.0 (default: 80 90 100)"
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help=about)
    parser.add_argument("--kernel", help="compile only this kernel file, e.g. decode")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    unknown = [a for a in args.arch if a not in SHARED_LIMITS]
    if unknown:
        parser.error(f"--arch {unknown[0]}: known are {', '.join(map(str, SHARED_LIMITS))}")
    reports = [inspect(config, arch) for arch in args.arch for config in all_configs(arch, args.kernel)]
    if not reports:
        parser.error(f"--kernel {args.kernel}: no kernel file of that name with aot_configs()")
    if args.json:
        print(
            json.dumps(
                [
                    asdict(r) | {"rotation_cost": r.rotation_cost, "rotation_cost_most": r.rotation_cost_most}
                    for r in reports
                ],
                indent=1,
            )
        )
    else:
        print(table(reports))
    bad = [r for r in reports if r.spills or r.shared > r.shared_limit]
    for r in bad:
        print(f"{r.name}, sm_{r.arch}: {r.spills} spills, {r.shared} of {r.shared_limit} bytes", file=sys.stderr)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
