"""``irminsul-traffic replay``: recorded sessions sent to a server. ``irminsul replay`` is the same command."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from irminsul_client import Client, IrminsulClientError, Reuse
from irminsul_client.cli import INTERRUPTED, report_error
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from irminsul_traffic.replay import ReplayOptions, TurnRecord, as_json, render_report, replay, summarise
from irminsul_traffic.scenarios import SCENARIOS, apply_scenario
from irminsul_traffic.traces import TraceError, TraceSession, read_trace

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``irminsul-traffic`` and return its exit code."""
    parser = argparse.ArgumentParser(prog="irminsul-traffic", description="Send agent traffic to an Irminsul server.")
    add_replay(parser.add_subparsers(required=True, metavar="COMMAND"))
    args = parser.parse_args(argv)
    return int(args.func(args))


def add_replay(subparsers: Subparsers) -> None:
    """Add the ``replay`` command; it sets ``func(args) -> int``, which runs it and returns the exit code."""
    parser = subparsers.add_parser("replay", help="replay recorded agent sessions and report tokens and times")
    parser.add_argument("trace", metavar="TRACE", help=".jsonl, .jsonl.gz or .jsonl.zst, one session a line")
    parser.add_argument(
        "--scenario", choices=SCENARIOS, default="asis", help="how prompts are disturbed (default: asis)"
    )
    parser.add_argument("--sessions", type=_positive, default=1, metavar="N", help="sessions at once (default: 1)")
    parser.add_argument("--limit-sessions", type=_positive, metavar="K", help="only the first K sessions of the file")
    parser.add_argument("--turns", type=_positive, metavar="K", help="only the first K turns of each session")
    parser.add_argument(
        "--reuse", choices=get_args(Reuse), help="which cached work may be used (server default: content)"
    )
    parser.add_argument(
        "--max-tokens", type=_positive, default=16, metavar="K", help="tokens to generate (default: 16)"
    )
    parser.add_argument("--cache-salt", metavar="SALT", help="share cached work with requests of the same salt only")
    parser.add_argument("--url", metavar="HOST:PORT", help="gRPC address (default: IRMINSUL_URL or localhost:8001)")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds a request may take")
    parser.add_argument("--json", metavar="FILE", help="write every request and the summary here")
    parser.set_defaults(func=replay_command)


def _positive(text: str) -> int:
    value = int(text) if text.isdecimal() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return value


def replay_command(args: argparse.Namespace) -> int:
    """``replay``: progress bar and tables on standard output; exit code 1 if any request failed."""
    options = ReplayOptions(args.sessions, args.turns, args.reuse, args.max_tokens, args.cache_salt)
    console = Console()
    records: list[TurnRecord] = []
    interrupted = False
    begin = time.perf_counter()
    try:
        with Client(args.url, timeout=args.timeout) as client:
            client.check_ready()
            total = sum(len(s.turns[: args.turns]) for s in _trace_sessions(args))
            sessions = apply_scenario(args.scenario, _trace_sessions(args))
            begin = time.perf_counter()
            with _progress(console) as progress:
                task = progress.add_task("replaying", total=total, errors=0)

                def show(record: TurnRecord) -> None:
                    records.append(record)
                    progress.update(task, advance=1, errors=sum(r.error is not None for r in records))

                try:
                    records = replay(client, sessions, options, show)
                except KeyboardInterrupt:
                    interrupted = True
    except (IrminsulClientError, TraceError) as error:
        return report_error(error)
    summary = summarise(records, time.perf_counter() - begin)
    summary |= {"trace": str(args.trace), "scenario": args.scenario, "reuse": args.reuse, "concurrency": args.sessions}
    console.print(render_report(records, summary))
    if args.json:
        text = json.dumps(as_json(records, summary), ensure_ascii=False, indent=1)
        try:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            return report_error(IrminsulClientError(f"{args.json} cannot be written: {error.strerror}"))
    if interrupted:
        return INTERRUPTED
    return 1 if summary["errors"] else 0


def _trace_sessions(args: argparse.Namespace) -> Iterator[TraceSession]:
    return islice(read_trace(args.trace), args.limit_sessions)


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[errors]} errors"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
