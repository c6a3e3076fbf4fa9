"""The `irminsul` command: serve, inspect, demo, analyze, eval, top, generate and replay."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields, replace

from irminsul_client import IrminsulClientError
from irminsul_client.cli import add_generate
from irminsul_traffic.cli import add_replay
from irminsul_traffic.traces import TraceError

from irminsul_backend import __version__
from irminsul_backend.commands import analyze as analysis_command
from irminsul_backend.commands import eval as evaluation_command
from irminsul_backend.commands import top as top_command
from irminsul_backend.config import ServerConfig
from irminsul_backend.errors import IrminsulError

SETTINGS = {
    "model": ("DIR", "Hugging Face model folder (default: the small model that ships with Irminsul)"),
    "preset": ("NAME", "how prompts are cut into chunks: default or paper (default: {default})"),
    "device": ("NAME", "auto, cpu, cuda or cuda:N (default: {default})"),
    "dtype": ("NAME", "type of weights and cache: auto, float32, bfloat16 or float16 (default: {default})"),
    "capacity_tokens": ("N", "most tokens in the KV cache; 0 = sized to the memory (default: {default})"),
    "gpu_memory_fraction": ("SHARE", "share of the GPU's memory for weights and cache (default: {default})"),
    "max_batch_tokens": ("N", "most tokens in one forward pass (default: {default})"),
    "max_running": ("N", "most requests computed at once (default: {default})"),
    "max_waiting": ("N", "most requests that wait; more are refused (default: {default})"),
    "max_waiting_per_namespace": ("N", "most of them in one cache namespace (default: {default})"),
    "step_target_ms": (
        "MS",
        "longest time between two tokens while prompts are computed; 0 = by device (default: {default})",
    ),
    "max_text_bytes": ("N", "largest prompt text, in bytes (default: {default})"),
    "stream_interval_ms": ("MS", "least time between two responses of a stream; 0 = none (default: {default})"),
    "session_ttl_s": ("SECONDS", "time after which an idle session is forgotten (default: {default})"),
    "log_format": ("FORM", "lines of the log: text or json (default: {default})"),
    "log_ids": ("HOW", "request keys and session ids in the log: hashed or plain (default: {default})"),
    "threads": ("N", "CPU threads of the engine; 0 = one per core (default: {default})"),
}
"""Settings that are flags of `serve`, with metavar and help. Each is also the environment variable IRMINSUL_<NAME>."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="irminsul", description="MLA models on Triton with a KV cache addressed by content."
    )
    parser.add_argument("--version", action="version", version=f"irminsul {__version__}")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(
        subparsers.add_parser(
            "serve",
            help="start the server",
            description="Start a Triton server and run it until SIGINT, SIGTERM or SIGHUP. Each setting may also be "
            "given as the environment variable IRMINSUL_<NAME>; the flag takes precedence.",
        )
    )
    _add_inspect(subparsers.add_parser("inspect", help="what a model folder holds and whether it can be served"))
    demo = subparsers.add_parser("demo", help="see an agent session with and without content reuse")
    demo.set_defaults(func=_demo)
    analysis_command.add_arguments(
        subparsers.add_parser(
            "analyze", help="what content reuse would save on recorded prompts, and why prefixes break"
        )
    )
    evaluation_command.add_arguments(
        subparsers.add_parser("eval", help="what reuse does to answers, and rotation to a row's precision")
    )
    top_command.add_arguments(
        subparsers.add_parser("top", help="watch a running server", description="What a running server does.")
    )
    add_generate(subparsers)
    add_replay(subparsers)
    args = parser.parse_args(argv)
    try:
        return int(args.func(args) or 0)
    except (IrminsulError, IrminsulClientError, TraceError) as error:
        print(f"irminsul: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _add_serve(parser: argparse.ArgumentParser) -> None:
    from irminsul_backend.triton_io.server.launcher import LOCALHOST, PORTS

    for name, (metavar, text) in SETTINGS.items():
        default = next(f.default for f in fields(ServerConfig) if f.name == name)
        flag, help_text = "--" + name.replace("_", "-"), text.format(default=default)
        parser.add_argument(flag, type=type(default), metavar=metavar, help=help_text)
    parser.add_argument(
        "--require-cache-salt",
        action="store_true",
        default=None,
        help="let a request without a cache_salt reuse the rows of its own session only",
    )
    parser.add_argument(
        "--escape-special-tokens",
        action="store_true",
        default=None,
        help="read special tokens in text_input as text, as in messages, unless the request allows them",
    )
    parser.add_argument("--host", default=LOCALHOST, help=f"address to listen on (default: {LOCALHOST})")
    for name, port in PORTS.items():
        parser.add_argument(
            f"--{name}-port",
            type=int,
            metavar="PORT",
            help=f"the {name} port; 0 = any free one (default: IRMINSUL_{name.upper()}_PORT, else {port})",
        )
    parser.add_argument(
        "--verbose", action="store_true", help="show everything that the server logs, not only warnings and errors"
    )
    parser.set_defaults(func=serve)


def serve(args: argparse.Namespace) -> int:
    """Run a server until it is told to stop by SIGINT, SIGTERM or SIGHUP."""
    from irminsul_backend.triton_io.server.launcher import MODEL, PORTS, Ports, raise_interrupt, start_server

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, raise_interrupt)
    names = [*SETTINGS, "require_cache_salt", "escape_special_tokens"]
    given = {name: value for name in names if (value := getattr(args, name)) is not None}
    config = replace(ServerConfig.from_env(), log_level="INFO" if args.verbose else "WARNING", **given)
    ports = Ports.from_env(**PORTS)
    ports = replace(ports, **{n: value for n in PORTS if (value := getattr(args, f"{n}_port")) is not None})
    server = None
    try:
        server = start_server(config, args.host, ports, args.verbose)
        name = os.path.basename(os.path.abspath(config.model))
        urls = ", ".join(f"{n} {server.host}:{getattr(server.ports, n)}" for n in PORTS)
        print(f"{MODEL} ready: model {name}, {urls}", flush=True)
        code = server.wait()
        print(f"irminsul: the server ended by itself with exit code {code}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        if server is not None:
            server.stop()


def _add_inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model_dir", metavar="MODEL_DIR", help="Hugging Face model folder; its weights are not read")
    parser.add_argument(
        "--memory",
        type=_positive,
        metavar="GIB",
        help="memory for weights and cache (default: the GPU's or, without one, this machine's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(func=_inspect)


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e9:
        raise argparse.ArgumentTypeError(f"{text} is not a number of GiB over 0")
    return value


def _inspect(args: argparse.Namespace) -> int:
    from irminsul_backend.commands import inspect

    return inspect.main(args)


def _demo(args: argparse.Namespace) -> int:
    from irminsul_backend.commands import demo

    return int(demo.main(args) or 0)


if __name__ == "__main__":
    sys.exit(main())
