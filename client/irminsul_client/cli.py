"""``irminsul-client generate``: one request from the command line. ``irminsul generate`` is the same command."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from irminsul_client._client import Client, collect, default_url
from irminsul_client._http import HTTPClient, default_http_url
from irminsul_client._inputs import Reuse
from irminsul_client._types import Chunk, Usage
from irminsul_client.errors import InvalidRequest, IrminsulClientError, ServerUnavailable

if TYPE_CHECKING:
    Subparsers = argparse._SubParsersAction[argparse.ArgumentParser]

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells report it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``irminsul-client`` and return its exit code."""
    parser = argparse.ArgumentParser(prog="irminsul-client", description="Talk to an Irminsul server.")
    add_generate(parser.add_subparsers(required=True, metavar="COMMAND"))
    args = parser.parse_args(argv)
    return int(args.func(args))


def add_generate(subparsers: Subparsers) -> None:
    """Add the ``generate`` command; it sets ``func(args) -> int``, which runs it and returns the exit code."""
    parser = subparsers.add_parser("generate", help="send one prompt and print the answer")
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
    parser.add_argument(
        "--reuse", choices=get_args(Reuse), help="which cached work may be used (server default: content)"
    )
    parser.add_argument("--cache-salt", metavar="SALT", help="share cached work with requests of the same salt only")
    parser.add_argument("--temperature", type=float, help="0 is greedy, the default")
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; repeatable")
    parser.set_defaults(func=generate_command)


def generate_command(args: argparse.Namespace) -> int:
    """``generate``: the text on standard output, usage and errors on standard error."""
    try:
        options = _generate_options(args)
        chunks = (_http_chunks if args.http else _grpc_chunks)(args, options)
        answer = collect(_printed(chunks) if args.stream and not args.json else chunks)
    except KeyboardInterrupt:
        return INTERRUPTED
    except IrminsulClientError as error:
        return report_error(error)
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


def report_error(error: Exception) -> int:
    """Print a command's error as one line on standard error; returns exit code 1."""
    message = str(error)
    if isinstance(error, ServerUnavailable):
        message += (
            f"; start one with `irminsul serve`, or name its address with --url"
            f" (defaults: gRPC {default_url()}, HTTP {default_http_url()})"
        )
    elif isinstance(error, IrminsulClientError):
        message = f"{type(error).__name__}: {message}"
    colored = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    print("\033[31merror:\033[0m" if colored else "error:", message, file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
