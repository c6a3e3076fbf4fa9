"""``generate`` and ``replay``: the client's commands, on their own (``irminsul-client``) or inside ``irminsul``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from irminsul_traffic import replay as replaying
from irminsul_traffic.scenarios import SCENARIOS, apply_scenario
from irminsul_traffic.traces import TraceSession, read_trace
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from irminsul_client._client import Client, collect, default_url
from irminsul_client._http import HTTPClient, default_http_url
from irminsul_client._types import Chunk, Usage
from irminsul_client.errors import InvalidRequest, IrminsulClientError, ServerUnavailable, TraceError

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

REUSE_MODES = ("off", "exact", "content")
INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``irminsul-client``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="irminsul-client", description="Talk to an Irminsul server.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    add_commands(subparsers)
    args = parser.parse_args(argv)
    return int(args.func(args))


def add_commands(subparsers: Subparsers) -> None:
    """Register ``generate`` and ``replay``; each sets ``func(args) -> int``, its exit code."""
    _add_generate(subparsers.add_parser("generate", help="send one prompt and print the answer"))
    _add_replay(subparsers.add_parser("replay", help="replay recorded agent sessions and report tokens and times"))


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="prompt text; - reads it from standard input")
    parser.add_argument("--messages", metavar="FILE", help="JSON list of chat messages instead of a prompt")
    parser.add_argument("--tools", metavar="FILE", help="JSON list of tool schemas")
    parser.add_argument("--session", metavar="ID", help="session to continue or open; it stays open afterwards")
    parser.add_argument("--end", action="store_true", help="end the session with this request")
    parser.add_argument("--stream", action="store_true", help="print the text as it comes")
    parser.add_argument("--http", action="store_true", help="use HTTP instead of gRPC")
    parser.add_argument(
        "--url", help="server address (gRPC: IRMINSUL_URL or localhost:8001; HTTP: IRMINSUL_HTTP_URL or localhost:8000)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with text, ids, usage and times")
    parser.add_argument("--max-tokens", type=int, metavar="K", help="most tokens to generate")
    parser.add_argument("--reuse", choices=REUSE_MODES, help="which cached work may be used (server default: content)")
    parser.add_argument("--cache-salt", metavar="SALT", help="share cached work with requests of the same salt only")
    parser.add_argument("--temperature", type=float, help="0 is greedy, the default")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; repeatable")
    parser.set_defaults(func=generate_command)


def _add_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trace", metavar="TRACE", help=".jsonl, .jsonl.gz or .jsonl.zst, one session a line")
    parser.add_argument(
        "--scenario", choices=SCENARIOS, default="asis", help="how prompts are disturbed (default: asis)"
    )
    parser.add_argument("--sessions", type=_positive, default=1, metavar="N", help="sessions at once (default: 1)")
    parser.add_argument("--limit-sessions", type=_positive, metavar="K", help="only the first K sessions of the file")
    parser.add_argument("--turns", type=_positive, metavar="K", help="only the first K turns of each session")
    parser.add_argument("--reuse", choices=REUSE_MODES, help="which cached work may be used (server default: content)")
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


def generate_command(args: argparse.Namespace) -> int:
    """``generate``: the text on standard output, usage and errors on standard error."""
    try:
        options = _generate_options(args)
        chunks = (_http_chunks if args.http else _grpc_chunks)(args, options)
        answer = collect(_printed(chunks) if args.stream and not args.json else chunks)
    except KeyboardInterrupt:
        return INTERRUPTED
    except IrminsulClientError as error:
        return _fail(error)
    if args.json:
        print(json.dumps(answer.as_dict(), ensure_ascii=False))
        return 0
    print("" if args.stream else answer.text)
    if answer.usage is not None:
        print(describe_usage(answer.usage), file=sys.stderr)
    return 0


def _grpc_chunks(args: argparse.Namespace, options: dict[str, Any]) -> Iterator[Chunk]:
    with Client(args.url) as client:
        if args.session is None:
            yield from client.stream(**options)
        else:
            yield from client.session(args.session).stream(end=args.end, **options)


def _http_chunks(args: argparse.Namespace, options: dict[str, Any]) -> Iterator[Chunk]:
    with HTTPClient(args.url) as client:
        if args.stream:
            yield from client.stream(session_id=args.session, end=args.end, **options)
        else:
            answer = client.generate(session_id=args.session, end=args.end, **options)
            yield Chunk(answer.text, answer.token_ids, 0, answer.log_probs, answer.finish_reason, answer.usage)


def _generate_options(args: argparse.Namespace) -> dict[str, Any]:
    if args.messages is not None and args.prompt is not None:
        raise InvalidRequest("give either PROMPT or --messages, not both")
    names = ("max_tokens", "reuse", "cache_salt", "temperature", "top_k", "top_p", "seed")
    options: dict[str, Any] = {name: getattr(args, name) for name in names}
    options["stop_words"] = args.stop
    if args.tools is not None:
        options["tools"] = _json_list(args.tools)
    if args.messages is not None:
        options["messages"] = _json_list(args.messages)
    elif args.prompt in (None, "-"):
        if sys.stdin.isatty():
            raise InvalidRequest("no prompt; give PROMPT or --messages FILE, or pipe the prompt in")
        options["text"] = sys.stdin.read()
    else:
        options["text"] = args.prompt
    return options


def _json_list(path: str) -> list[Any]:
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, list):
        raise InvalidRequest(f"{path} holds {type(value).__name__}; it must be a JSON list")
    return value


def _printed(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    for chunk in chunks:
        print(chunk.text, end="", flush=True)
        yield chunk


def describe_usage(usage: Usage) -> str:
    """One line about what a request cost."""
    return (
        f"prompt {usage.prompt_tokens} = exact {usage.exact_tokens} + shifted {usage.shifted_tokens}"
        f" + computed {usage.computed_tokens} ({usage.segments} segments); generated {usage.completion_tokens};"
        f" queue {usage.queue_ms:.1f} ms, first token {usage.ttft_ms:.1f} ms"
    )


def replay_command(args: argparse.Namespace) -> int:
    """``replay``: progress bar and tables on standard output; exit code 1 if any request failed."""
    options = replaying.ReplayOptions(args.sessions, args.turns, args.reuse, args.max_tokens, args.cache_salt)
    console = Console()
    records: list[replaying.TurnRecord] = []
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

                def show(record: replaying.TurnRecord) -> None:
                    records.append(record)
                    progress.update(task, advance=1, errors=sum(r.error is not None for r in records))

                try:
                    records = replaying.replay(client, sessions, options, show)
                except KeyboardInterrupt:
                    interrupted = True
    except IrminsulClientError as error:
        return _fail(error)
    summary = replaying.summarise(records, time.perf_counter() - begin)
    summary |= {"trace": str(args.trace), "scenario": args.scenario, "reuse": args.reuse, "concurrency": args.sessions}
    console.print(replaying.render_report(records, summary))
    if args.json:
        text = json.dumps(replaying.as_json(records, summary), ensure_ascii=False, indent=1)
        try:
            Path(args.json).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            return _fail(IrminsulClientError(f"{args.json} cannot be written: {error.strerror}"))
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


def _fail(error: IrminsulClientError) -> int:
    message = str(error)
    if isinstance(error, ServerUnavailable):
        message += (
            f"; start one with `irminsul serve`, or name its address with --url"
            f" (defaults: gRPC {default_url()}, HTTP {default_http_url()})"
        )
    kind = "" if isinstance(error, ServerUnavailable | TraceError) else f"{type(error).__name__}: "
    Console(stderr=True, soft_wrap=True).print(f"[red]error:[/red] {escape(kind + message)}", highlight=False)
    return 1


if __name__ == "__main__":
    sys.exit(main())
