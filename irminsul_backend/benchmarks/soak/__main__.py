"""`make soak`: the server under load, faults and hostile requests, and one table of what was measured.

    python -m irminsul_backend.benchmarks.soak [--only NAME ...] [--short] [--scale SHARE] [--json FILE]

Exit code 1 if a bar is missed. At scale 1 all checks together take under 30 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from irminsul_backend.benchmarks.soak.cancels import cancels
from irminsul_backend.benchmarks.soak.harness import Check, Row, Soak
from irminsul_backend.benchmarks.soak.kills import kills
from irminsul_backend.benchmarks.soak.listed import listed
from irminsul_backend.benchmarks.soak.lives import lives
from irminsul_backend.benchmarks.soak.malformed import malformed
from irminsul_backend.benchmarks.soak.sessions import sessions
from irminsul_backend.benchmarks.soak.tenants import tenants
from irminsul_backend.benchmarks.soak.tight_pool import tight_pool

CHECKS: dict[str, Check] = {
    "listed": listed,
    "sessions": sessions,
    "tenants": tenants,
    "cancels": cancels,
    "malformed": malformed,
    "kills": kills,
    "tight_pool": tight_pool,
    "lives": lives,
}
TRACES = Path("../shared/traces")
SHORT = 0.01
FILE_WIDTH = 140


def run(soak: Soak, names: list[str]) -> dict[str, list[Row]]:
    """The rows of each check; one that breaks has a row that says so, and the next one still runs."""
    table: dict[str, list[Row]] = {}
    for name in names:
        soak.say(f"--- {name}")
        rows = table[name] = []
        began = time.monotonic()
        try:
            for row in CHECKS[name](soak):
                rows.append(row)
        except Exception as error:
            rows.append(Row("the check itself", "runs to its end", f"{type(error).__name__}: {error}"[:300], False))
        soak.say(f"--- {name}: {time.monotonic() - began:.0f} s")
    return table


def show(console: Console, table: dict[str, list[Row]]) -> None:
    shown = Table(title="make soak", title_justify="left", show_lines=True)
    for column in ("check", "what", "bar", "measured", ""):
        shown.add_column(column)
    for name, rows in table.items():
        for number, row in enumerate(rows):
            verdict = "[green]ok[/]" if row.ok else "[red]missed[/]"
            shown.add_row("" if number else name, *(text.replace("[", r"\[") for text in row[:3]), verdict)
    console.print(shown)


def main() -> int:
    parser = argparse.ArgumentParser(description="Soak tests against real servers; one table; exit 1 on a missed bar.")
    parser.add_argument("--only", nargs="+", choices=CHECKS, default=list(CHECKS), help="checks to run (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, metavar="SHARE", help="share of the full counts and times")
    parser.add_argument("--short", action="store_true", help=f"--scale {SHORT}")
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help=f"recorded prompts ({TRACES})")
    parser.add_argument("--found", type=Path, metavar="DIR", help="where logs and minimal requests go")
    parser.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    args = parser.parse_args()
    if not 0 < args.scale <= 100:
        parser.error(f"--scale is {args.scale}; it must be over 0, at most 100")
    found = args.found or Path(tempfile.mkdtemp(prefix="irminsul-soak-"))
    found.mkdir(parents=True, exist_ok=True)
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    began = time.monotonic()

    def say(text: str) -> None:
        console.print(f"[{time.monotonic() - began:6.0f} s] {text}", markup=False, highlight=False, soft_wrap=True)

    soak = Soak(SHORT if args.short else args.scale, args.traces, found, say)
    # Servers write to this process's standard error; what they say under attack would bury the table.
    with (found / "servers.log").open("a", encoding="utf-8") as log, contextlib.redirect_stderr(log):
        table = run(soak, args.only)
    show(console, table)
    console.print(f"{time.monotonic() - began:.0f} s at scale {soak.scale:g}; logs in {found}", highlight=False)
    if args.json:
        rows = {name: [row._asdict() for row in rows] for name, rows in table.items()}
        Path(args.json).write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if all(row.ok for rows in table.values() for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
