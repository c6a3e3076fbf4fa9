"""Compile every kernel for GPUs that are not there, and read what came out.

    python -m irminsul_kernels.tools.aot [--arch 80 90 100] [--kernel decode] [--json]

A kernel file offers `aot_configs(arch) -> list[KernelConfig]`: what it launches on that architecture. Each is compiled
by Triton and disassembled; the table shows registers, spills, stack, shared memory, and the instructions that one turn
of the main loop (the loop with the most matrix instructions) executes at least and at most: on its cheapest and on its
dearest way. Where a kernel rotates rows, the same configuration without rotation is compiled too, so the price of
rotation stands beside it, for both ways.

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

ARCHITECTURES = (80, 90, 100)
SHARED_LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory one block may have, by compute capability (CUDA programming guide)."""


@dataclass(frozen=True)
class Report:
    """What the compiler made of one configuration."""

    name: str
    arch: int
    registers: int
    """Per thread."""
    spills: int
    """Instructions that store to or load from local memory."""
    stack: int
    """Bytes per thread."""
    shared: int
    """Bytes per block."""
    shared_limit: int
    loop_least: int
    """Instructions of the cheapest and of the dearest way once through the main loop; 0 without a loop."""
    loop_most: int
    global_loads_least: int
    global_loads_most: int
    """LDG instructions of these ways; the asynchronous copies are not among them."""
    matrix_products: int
    """Tensor-core instructions of the dearest way."""
    wide_copies: int
    """16-byte asynchronous copies in the whole kernel."""
    unrotated_least: int | None
    unrotated_most: int | None
    """The same ways of the same configuration without rotation; None where a kernel does not rotate."""

    @property
    def rotation_cost(self) -> float | None:
        """Instructions that rotation adds to the cheapest way through the main loop, as a share."""
        return self.loop_least / self.unrotated_least - 1 if self.unrotated_least else None

    @property
    def rotation_cost_most(self) -> float | None:
        """The same for the dearest way."""
        return self.loop_most / self.unrotated_most - 1 if self.unrotated_most else None


def inspect(config: KernelConfig, arch: int) -> Report:
    """Compile `config` for compute capability `arch` (80: 8.0) and read the machine code.

    Raises:
        ValueError: an architecture whose limits are not known.
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
        usage, sass = _cuobjdump("-res-usage", cubin), _cuobjdump("-sass", cubin)
    resources = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    code = disassemble(sass)
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
        ValueError: an argument of the kernel without a type or value.
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


def _cuobjdump(option: str, cubin: Path) -> str:
    from triton import knobs

    done = subprocess.run([knobs.nvidia.cuobjdump.path, option, str(cubin)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"cuobjdump {option} failed: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


@dataclass(frozen=True)
class Instruction:
    """One line of machine code."""

    address: int
    predicated: bool
    opcode: str
    operands: str

    @property
    def is_matrix_product(self) -> bool:
        return re.match(r"(HMMA|HGMMA|UTC\w*MMA|QMMA|IMMA)", self.opcode) is not None


_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ )?\s*([A-Z][\w.]*)\s*([^;]*);")


def disassemble(sass: str) -> list[Instruction]:
    """Instructions of a `cuobjdump -sass` listing, in order of address."""
    found = [Instruction(int(m[1], 16), bool(m[2]), m[3], m[4].strip()) for m in _LINE.finditer(sass)]
    return [i for i in found if i.opcode != "NOP"]


def main_loop(code: list[Instruction]) -> tuple[list[Instruction], list[Instruction]]:
    """The cheapest and the dearest way once through the loop with the most matrix products.

    Loops are found from the control flow, not from addresses: the compiler moves unlikely branches out of line. An
    inner loop counts as one turn. Without a loop both ways are empty.
    """
    blocks, successors = _control_flow(code)
    loops = [_loop_body(head, tail, successors) for head, tail in _back_edges(successors)]
    if not loops:
        return [], []

    def weight(loop: tuple[int, set[int]]) -> tuple[int, int]:
        inside = [i for block in loop[1] for i in blocks[block]]
        return sum(i.is_matrix_product for i in inside), len(inside)

    head, body = max(loops, key=weight)
    back = set(_back_edges(successors))
    inner = {b: [n for n in successors[b] if n in body and n != head and (n, b) not in back] for b in body}
    ends = {b for b in body if head in successors[b]}
    ways = [_way(head, inner, ends, blocks, choose) for choose in (min, max)]
    return tuple([i for block in way for i in blocks[block]] for way in ways)  # type: ignore[return-value]


def _control_flow(code: list[Instruction]) -> tuple[list[list[Instruction]], list[list[int]]]:
    """Basic blocks and the blocks that may follow each. A BSYNC goes to the address its BSSY named."""
    index = {i.address: n for n, i in enumerate(code)}
    addresses = sorted(index)

    def at(address: int) -> int:
        # a target may be a NOP that was left out: go on to the next instruction
        return index[min((a for a in addresses if a >= address), default=addresses[-1])]

    barrier: dict[str, int] = {}
    targets: dict[int, list[int]] = {}
    for n, i in enumerate(code):
        name = i.opcode.split(".")[0]
        goal = re.search(r"0x([0-9a-f]+)$", i.operands.split("(")[0].strip().strip("`"))
        if name == "BSSY" and goal:
            barrier[i.operands.split(",")[0]] = int(goal[1], 16)
        elif name == "BSYNC":
            key = i.operands.split(",")[0]
            targets[n] = [at(barrier[key])] if key in barrier else [n + 1]
        elif name in ("BRA", "UBRA") and goal:
            conditional = i.predicated or re.match(r"!?U?P\w", i.operands) or ".DIV" in i.opcode
            targets[n] = [at(int(goal[1], 16))] + ([n + 1] if conditional else [])
        elif name in ("EXIT", "RET", "BRX"):
            targets[n] = [n + 1] if i.predicated else []
    starts = {0} | {t for goals in targets.values() for t in goals} | {n + 1 for n in targets}
    cuts = sorted(s for s in starts if s < len(code))
    block_of = {start: b for b, start in enumerate(cuts)}
    blocks = [code[a:b] for a, b in zip(cuts, [*cuts[1:], len(code)], strict=True)]
    successors = []
    for b, start in enumerate(cuts):
        last = start + len(blocks[b]) - 1
        goals = targets.get(last, [last + 1])
        successors.append(sorted({block_of[g] for g in goals if g in block_of}))
    return blocks, successors


def _back_edges(successors: list[list[int]]) -> list[tuple[int, int]]:
    """(head, tail) of each edge to a block that is still open in a depth-first walk from block 0."""
    found, state = [], [0] * len(successors)
    stack = [(0, iter(successors[0]))]
    state[0] = 1
    while stack:
        block, rest = stack[-1]
        following = next(rest, None)
        if following is None:
            state[block] = 2
            stack.pop()
        elif state[following] == 1:
            found.append((following, block))
        elif state[following] == 0:
            state[following] = 1
            stack.append((following, iter(successors[following])))
    return found


def _loop_body(head: int, tail: int, successors: list[list[int]]) -> tuple[int, set[int]]:
    """All blocks that reach `tail` without passing `head`."""
    before: dict[int, list[int]] = {}
    for block, following in enumerate(successors):
        for f in following:
            before.setdefault(f, []).append(block)
    body, open_blocks = {head, tail}, [tail]
    while open_blocks:
        block = open_blocks.pop()
        for b in before.get(block, []) if block != head else []:
            if b not in body:
                body.add(b)
                open_blocks.append(b)
    return head, body


def _way(head: int, inner: dict[int, list[int]], ends: set[int], blocks: list[list[Instruction]], choose: Any) -> Any:
    """The way from `head` to one of `ends` with the fewest (choose = min) or the most instructions."""
    known: dict[int, tuple[int, list[int]] | None] = {}

    def best(block: int) -> tuple[int, list[int]] | None:
        if block not in known:
            known[block] = None
            options = [o for o in map(best, inner[block]) if o is not None]
            if block in ends:
                options.append((0, []))
            if options:
                length, way = choose(options, key=lambda option: option[0])
                known[block] = (length + len(blocks[block]), [block, *way])
        return known[block]

    found = best(head)
    return found[1] if found else []


def all_configs(arch: int, only: str | None = None) -> list[KernelConfig]:
    """What every kernel file launches on `arch`, or the file named `only`."""
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
    """One line a report."""
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
    """Returns 1 where a kernel spills or asks for more shared memory than the device has."""
    parser = argparse.ArgumentParser(
        prog="python -m irminsul_kernels.tools.aot", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--arch", type=int, nargs="+", default=list(ARCHITECTURES), help="compute capabilities")
    parser.add_argument("--kernel", help="only this kernel file, e.g. decode")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")
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
    # run the module that the kernel files import, not a second copy of it
    from irminsul_kernels.tools.aot import main as imported_main

    sys.exit(imported_main())
