"""`irminsul top`: what a running server does, read from its metrics port alone and shown until Ctrl-C."""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from irminsul_backend.commands.scrape import Scrape, ScrapeError, read_metrics, summarise

QUANTILE_SECONDS = 60.0
"""The live view's quantiles are of so many seconds: between two readings there may be no request at all."""
LATENCIES = {"ttft_ms": "first token", "inter_token_ms": "per token", "queue_ms": "queue", "prefill_ms": "prefill"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to its parser."""
    parser.add_argument(
        "--url", metavar="HOST[:PORT]", help="the server; only its host is used (default: IRMINSUL_URL or localhost)"
    )
    parser.add_argument(
        "--metrics-url",
        metavar="URL",
        help="the metrics page (default: http://HOST:PORT/metrics, with IRMINSUL_METRICS_PORT or 8002)",
    )
    parser.add_argument(
        "--interval", type=_seconds, default=2.0, metavar="S", help="seconds between two readings (default: 2)"
    )
    parser.add_argument("--once", action="store_true", help="two readings, one view, and an end")
    parser.add_argument("--json", action="store_true", help="print an object a line instead of a view")
    parser.set_defaults(func=main)


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0.1 to 3600")
    return value


def main(args: argparse.Namespace) -> int:
    """Show a server until Ctrl-C, or once. Raises ScrapeError if it does not answer at first, or with --once ever."""
    url = args.metrics_url or metrics_url(args.url or os.environ.get("IRMINSUL_URL", ""))
    history = deque([read_metrics(url)])
    console = Console()
    if args.once:
        time.sleep(args.interval)
        history.append(read_metrics(url))
        report(console, url, history, args.json)
    elif args.json:
        for _ in readings(url, history, args.interval):
            report(console, url, history, True)
    else:
        with Live(Text(f"reading {url} …"), console=console, auto_refresh=False, screen=console.is_terminal) as live:
            for error in readings(url, history, args.interval):
                live.update(Text(error, style="red") if error else view(url, history), refresh=True)
    return 0


def metrics_url(server: str) -> str:
    """The metrics page of a server that is named as HOST, HOST:PORT or a URL."""
    host = server.rpartition("://")[2].partition("/")[0]
    if host.startswith("["):
        host = host.partition("]")[0] + "]"
    elif host.count(":") == 1:
        host = host.partition(":")[0]
    return f"http://{host or 'localhost'}:{os.environ.get('IRMINSUL_METRICS_PORT') or 8002}/metrics"


def readings(url: str, history: deque[Scrape], interval: float) -> Iterator[str]:
    """Add a reading every `interval` seconds and yield ""; or what went wrong, after which the history begins anew."""
    while True:
        time.sleep(interval)
        try:
            scrape = read_metrics(url)
        except ScrapeError as error:
            history.clear()
            yield str(error)
            continue
        history.append(scrape)
        while len(history) > 2 and scrape.at - history[0].at > QUANTILE_SECONDS:
            history.popleft()
        if len(history) > 1:
            yield ""


def report(console: Console, url: str, history: deque[Scrape], as_json: bool) -> None:
    """Print the last interval once."""
    if as_json:
        interval = summarise(history[-2], history[-1])
        since_start = summarise(Scrape(), history[-1])
        for name in ("seconds", "requests_per_s", "tokens_per_s", "steps_per_s"):
            del since_start[name]  # when the server started is not among its metrics
        print(json.dumps({"interval": interval, "since_start": since_start}), flush=True)
    else:
        console.print(view(url, history))


def view(url: str, history: deque[Scrape]) -> RenderableType:
    """One screen: rates of the last interval, quantiles of the last minute, counts since the server's start."""
    now, minute = summarise(history[-2], history[-1]), summarise(history[0], history[-1])
    total = summarise(Scrape(), history[-1])
    head = Text(f"irminsul top   {url}   {time.strftime('%H:%M:%S')}", style="bold")
    return Group(head, "", _rates(now), "", _latencies(minute), "", _cache(total), "", _counts(total))


def _rates(now: dict[str, Any]) -> Table:
    table = _grid("requests/s", *now["requests_per_s"])
    table.add_row("", *(f"{value:,.1f}" for value in now["requests_per_s"].values()))
    tokens = now["tokens_per_s"]
    table.add_row("[bold]tokens/s", *(f"[dim]{name}" for name in tokens))
    table.add_row("", *(f"{value:,.0f}" for value in tokens.values()))
    table.add_row("[bold]now", "[dim]waiting", "[dim]running", "[dim]sessions", "[dim]steps/s")
    table.add_row("", *(f"{now[name]:,}" for name in ("waiting", "running", "sessions")), f"{now['steps_per_s']:,.1f}")
    return table


def _latencies(minute: dict[str, Any]) -> Table:
    table = _grid(f"ms, last {minute['seconds']:.0f} s", *LATENCIES.values())
    for share in ("p50", "p95"):
        table.add_row(share, *("–" if (v := minute[name][share]) is None else f"{v:,.1f}" for name in LATENCIES))
    return table


def _cache(total: dict[str, Any]) -> Table:
    table = _pairs()
    used, capacity = total["cache"]["used"], max(total["cache"]["capacity"], 1)
    table.add_row(
        "[bold]cache",
        ProgressBar(capacity, used, width=24),
        f"{used / capacity:.0%} of {capacity:,} slots, {total['donors']:,} donors",
    )
    return table


def _counts(total: dict[str, Any]) -> Table:
    table = _pairs()
    plain = ("preemptions", "evictions", "distrusted", "cache_resets", "faults")
    table.add_row("[bold]since start", ", ".join(f"{total[name]:,} {name.replace('_', ' ')}" for name in plain))
    for name in ("rejections", "cancellations"):
        causes = {cause: count for cause, count in total[name].items() if count}
        text = ", ".join(f"{count:,} {cause.replace('_', ' ')}" for cause, count in causes.items()) or "none"
        table.add_row(f"[bold]{name}", text)
    if total["segments_per_prompt"] is not None:
        table.add_row("[bold]segments", f"{total['segments_per_prompt']:,} per prompt")
    return table


def _pairs() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(min_width=14, no_wrap=True)
    return table


def _grid(title: str, *columns: str) -> Table:
    table = Table(box=None, show_header=True, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column(f"[not dim bold]{title}", min_width=16)
    for column in columns:
        table.add_column(column, justify="right", min_width=12)
    return table
