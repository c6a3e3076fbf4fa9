"""Results of a benchmark run, as a table and as JSON. Independent of GPUs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Row:
    """One timing."""

    part: str
    name: str
    """What was timed: "decode", "torch SDPA"."""
    case: str
    """On which input: "16 heads, batch 64, 8192 keys"."""
    time_us: float
    """Median time in microseconds."""
    rate: float | None = None
    unit: str = ""
    """Unit of `rate`: "GB/s", "TFLOP/s", "tokens/s"."""
    share: float | None = None
    """`rate` as a share of what the device reaches: copy bandwidth for GB/s, bf16 matmul rate for TFLOP/s."""
    note: str = ""


@dataclass(frozen=True)
class Check:
    """A kernel against its float64 reference: relative L2 error of its output."""

    name: str
    error: float
    limit: float

    @property
    def met(self) -> bool:
        return self.error <= self.limit  # NaN is not


@dataclass(frozen=True)
class Bar:
    """A target and the figure measured for it."""

    text: str
    value: float | None
    """None: not measured."""
    limit: float
    at_least: bool
    why_not: str = ""
    """Why it was not measured, or does not apply here."""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "met" if (self.value >= self.limit if self.at_least else self.value <= self.limit) else "missed"


@dataclass
class Report:
    machine: dict[str, str] = field(default_factory=dict)
    """Chip, capability, memory, versions, date."""
    checks: list[Check] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    """(what, why)"""
    seconds: float = 0.0

    @property
    def failed(self) -> bool:
        return not all(check.met for check in self.checks)

    def find(self, part: str, name: str, case: str) -> Row | None:
        return next((r for r in self.rows if (r.part, r.name, r.case) == (part, name, case)), None)

    def as_dict(self) -> dict[str, Any]:
        """The JSON object that `--json` writes."""
        return {
            "machine": self.machine,
            "seconds": self.seconds,
            "checks": [asdict(c) | {"met": c.met} for c in self.checks],
            "rows": [asdict(r) for r in self.rows],
            "bars": [asdict(b) | {"verdict": b.verdict} for b in self.bars],
            "skipped": [{"what": what, "why": why} for what, why in self.skipped],
        }

    def text(self) -> str:
        """The report as tables for a terminal."""
        blocks = ["\n".join(f"{name}: {value}" for name, value in self.machine.items())]
        if self.checks:
            cells = [(c.name, f"{c.error:.2e}", f"<= {c.limit:.1e}", "ok" if c.met else "WRONG") for c in self.checks]
            blocks.append(columns(("against float64", "relative L2", "limit", ""), cells))
        if self.rows:
            timings = [
                (
                    r.part,
                    r.name,
                    r.case,
                    duration(r.time_us),
                    _rate(r),
                    "" if r.share is None else f"{r.share:.0%}",
                    r.note,
                )
                for r in self.rows
            ]
            blocks.append(columns(("part", "what", "case", "time", "rate", "of ceiling", ""), timings))
        if self.bars:
            cells = [(b.text, "-" if b.value is None else f"{b.value:.3g}", b.verdict, b.why_not) for b in self.bars]
            blocks.append(columns(("bar", "here", "", ""), cells))
        if self.skipped:
            blocks.append(columns(("skipped", "why"), self.skipped))
        blocks.append(f"{self.seconds:.0f} s")
        return "\n\n".join(blocks)


def duration(us: float) -> str:
    """Three significant digits in us, ms or s."""
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{us / size:.3g} {unit}" if us < 1000 * size else f"{us / size:.0f} {unit}"
    return f"{us:.3g} us"


def _rate(row: Row) -> str:
    return "" if row.rate is None else f"{row.rate:,.{0 if row.rate >= 100 else 1}f} {row.unit}"


def columns(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Left-aligned columns under a header."""
    table = [tuple(header), *(tuple(r) for r in rows)]
    widths = [max(len(r[i]) for r in table) for i in range(len(table[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(r, widths, strict=True)).rstrip() for r in table]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
