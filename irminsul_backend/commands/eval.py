"""``irminsul eval``: its flags, the runs with a progress bar, and their tables."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from irminsul_backend.chunking import PRESETS
from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.request_spec import REUSE_POLICIES

LENGTHS = (256, 512, 1024, 2048)
FILE_WIDTH = 140
"""Columns of output that does not go to a terminal."""
HOPS = {"single_hop": "single-hop", "multi_hop": "multi-hop"}

NEEDLE = """\
Ask questions that have one right answer, stated in the prompt's documents, and count the right answers. Single-hop: one
fact tells it. Multi-hop: two facts in two documents must be joined. Every prompt is asked with reuse off and, beside
it, in the mode under test, after something whose rows it can reuse: for `exact` the same prompt without its question,
for `content` the same documents in reverse order under another system message."""

NEEDLE_EPILOG = """\
examples:
  irminsul eval needle --reuse off
  irminsul eval needle --reuse content --lengths 1024 2048 --prompts 200 --json needle.json
The other settings of the engine are the environment variables IRMINSUL_DEVICE, IRMINSUL_DTYPE, IRMINSUL_THREADS, ...
as for `irminsul serve`."""

ROTATION = """\
What moving a cached row to another position costs in precision: the 64 rotated numbers against float64, distances up to
131,072 positions, plain RoPE and YaRN, by the way the row is moved, next to what the paper reports."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(required=True, metavar="WHAT")
    needle = kinds.add_parser(
        "needle",
        help="share of right answers by prompt length, with and without reuse",
        description=NEEDLE,
        epilog=NEEDLE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    needle.add_argument("--model", metavar="DIR", help="model folder (default: the small model that ships)")
    needle.add_argument("--reuse", choices=REUSE_POLICIES, default="content", help="mode under test (default: content)")
    needle.add_argument(
        "--lengths",
        type=_at_least(1),
        nargs="+",
        default=list(LENGTHS),
        metavar="TOKENS",
        help=f"prompt lengths, which prompts come near to (default: {' '.join(map(str, LENGTHS))})",
    )
    needle.add_argument(
        "--prompts", type=_at_least(1), default=100, metavar="N", help="of each kind and length (default: 100)"
    )
    needle.add_argument("--seed", type=_at_least(0), default=0, metavar="N", help="other prompts (default: 0)")
    needle.add_argument("--preset", choices=tuple(PRESETS), help="how prompts are cut and matched (default: default)")
    needle.set_defaults(func=run_needle)
    rotation = kinds.add_parser("rotation", help="precision of moving a cached row", description=ROTATION)
    rotation.set_defaults(func=run_rotation)
    for kind in (needle, rotation):
        kind.add_argument("--json", metavar="FILE", help="also write the figures to FILE")


def run_needle(args: argparse.Namespace) -> int:
    from dataclasses import replace

    from irminsul_backend.config import ServerConfig
    from irminsul_backend.evaluation import needle

    _check_output(args.json)
    given = {name: value for name in ("model", "preset") if (value := getattr(args, name)) is not None}
    config = replace(ServerConfig.from_env(), **given)
    lengths = sorted(set(args.lengths))
    with _progress() as progress:
        task = progress.add_task("questions", total=len(lengths) * len(HOPS) * args.prompts)
        rows = needle.run(config, args.reuse, lengths, args.prompts, args.seed, lambda n: progress.advance(task, n))
    result = {"model": Path(config.model).resolve().name, "preset": config.preset, "reuse": args.reuse}
    result |= {"prompts": args.prompts, "seed": args.seed, "lengths": rows}
    console = _console()
    console.print(accuracy_table(result))
    console.print(mistakes_table(result))
    _write(args.json, result)
    return 0


def run_rotation(args: argparse.Namespace) -> int:
    from irminsul_backend.evaluation import rotation_error as rotation

    _check_output(args.json)
    with _progress() as progress:
        task = progress.add_task("moves", total=len(rotation.ROPES) * rotation.MANY_MOVES)
        result = rotation.measure(on_done=lambda n: progress.advance(task, n))
    console = _console()
    console.print(rotation_table(result))
    equal = "equals, bit for bit," if result["moved_often_equals_moved_once"] else "DIFFERS from"
    console.print(
        f"Ours moved {rotation.MANY_MOVES:,} times {equal} ours moved once. Bar: ours at most {result['bar']:.1e}: "
        f"{'met' if result['met'] else 'MISSED'}.",
        highlight=False,
    )
    _write(args.json, result)
    return 0


def accuracy_table(result: dict[str, Any]) -> Table:
    """Right answers by length and mode; `result` as written by --json."""
    table = Table(
        title=f"Right answers of {result['model']}, {result['prompts']} prompts of each kind (95 % Wilson intervals)",
        title_justify="left",
    )
    for name in ("length", "mean tokens", "reuse", "single-hop %", "multi-hop %", "reused %", "same first token %"):
        table.add_column(name, justify="left" if name == "reuse" else "right")
    for row in result["lengths"]:
        for mode in _modes(result):
            scores = [row[mode][kind] for kind in HOPS]
            off = mode == "off"
            table.add_row(
                f"{row['length']:,}" if off else "",
                f"{row['mean_tokens']:,.0f}" if off else "",
                mode,
                *(_accuracy(score) for score in scores),
                f"{50 * sum(score['reused_share'] for score in scores):.1f}",
                "" if off else f"{50 * sum(score['same_first_token'] for score in scores):.1f}",
            )
    return table


def mistakes_table(result: dict[str, Any]) -> Table:
    """What the answers were; `result` as written by --json."""
    table = Table(
        title="What was answered, % (first hop: the value of the first of the two facts)", title_justify="left"
    )
    for name in ("length", "question", "reuse", "right", "first hop", "other value of the prompt", "anything else"):
        table.add_column(name, justify="left" if name in ("question", "reuse") else "right")
    for row in result["lengths"]:
        for kind, name in HOPS.items():
            for mode in _modes(result):
                score = row[mode][kind]
                counts = [score[verdict] for verdict in ("right", "first_hop", "in_prompt", "other")]
                shares = [f"{100 * count / score['prompts']:.1f}" for count in counts]
                if kind == "single_hop":
                    shares[1] = ""
                table.add_row(f"{row['length']:,}", name, mode, *shares)
    return table


def rotation_table(result: dict[str, Any]) -> Table:
    """Errors by the way of moving; `result` as written by --json."""
    from irminsul_backend.evaluation.rotation_error import DIM, WAYS

    table = Table(
        title=f"Relative L2 error of the {DIM} rotated numbers against float64; {result['rows']:,} random rows, "
        f"|δ| up to {result['farthest']:,}",
        title_justify="left",
    )
    table.add_column("a row")
    for name in ("plain RoPE", "YaRN", "worst row", "largest change of a score"):
        table.add_column(name, justify="right")
    ropes = list(result["ropes"].values())
    for way, about in WAYS.items():
        found = [by_way[way] for by_way in ropes]
        table.add_row(
            about,
            *(f"{errors['relative_l2']:.2e}" for errors in found),
            f"{max(errors['worst_row_relative_l2'] for errors in found):.2e}",
            f"{max(errors['max_score_error'] for errors in found):.1e}",
        )
    table.add_row("the paper's figure (arXiv 2605.05696)", f"{result['paper_relative_l2']:.2e}", "", "", "")
    return table


def _modes(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(("off", result["reuse"])))


def _accuracy(score: dict[str, Any]) -> str:
    low, high = score["interval"]
    return f"{100 * score['accuracy']:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def _at_least(least: int) -> Any:
    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"{text[:32]!r} is not a whole number of at least {least}")
        return int(text)

    return number


def _check_output(path: str | None) -> None:
    """Refuse before the work what would fail after it."""
    if path is not None and (not Path(path).name or Path(path).is_dir() or not Path(path).absolute().parent.is_dir()):
        raise InvalidRequestError(f"--json {path or repr(path)} cannot be written: no such folder, or it is one")


def _write(path: str | None, result: dict[str, Any]) -> None:
    if path is None:
        return
    try:
        Path(path).write_text(json.dumps(result, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from error


def _console() -> Console:
    """Results go to standard output, progress to standard error."""
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    return console


def _progress() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
