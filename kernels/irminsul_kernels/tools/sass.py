"""Machine code of a kernel as `cuobjdump -sass` lists it: its instructions, and the paths through its main loop."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any


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
    """The shortest and the longest path through one iteration of the loop with the most matrix instructions.

    Loops are found from the control flow, not from addresses: the compiler moves unlikely branches out of line. An
    inner loop counts as one iteration. Without a loop both paths are empty.
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
    """The path from `head` to one of `ends` with the fewest (choose = min) or the most instructions (max)."""
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
