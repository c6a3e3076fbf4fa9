"""The `irminsul` command: serve, top, inspect, demo, analyze, eval, top, generate and replay."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from irminsul_client import IrminsulClientError
from irminsul_client.cli import add_generate
from irminsul_traffic.cli import add_replay
from irminsul_traffic.traces import TraceError

from irminsul_backend import __version__
from irminsul_backend.commands import analyze as analysis_command
from irminsul_backend.commands import eval as evaluation_command
from irminsul_backend.commands import top as top_command
from irminsul_backend.config import SETTINGS, ServerConfig
from irminsul_backend.errors import IrminsulError

if TYPE_CHECKING:
    from irminsul_backend.triton_io.server.launcher import Server


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
            description="Start a Triton server and run it until SIGINT, SIGTERM or SIGHUP. At the first one running "
            "requests finish, at the second it ends at once. Each setting may also be given as the environment "
            "variable IRMINSUL_<NAME>; the flag takes precedence.",
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
    from irminsul_backend.triton_io.server.addresses import LOCALHOST, PORTS

    defaults = ServerConfig()
    for name, setting in SETTINGS.items():
        flag, default = "--" + name.replace("_", "-"), getattr(defaults, name)
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true", default=None, help=setting.doc)
        elif setting.metavar:
            zero = f"; 0 = {setting.zero}" if setting.zero else ""
            told = "" if name == "model" else f" (default: {default}{zero})"
            parser.add_argument(flag, type=type(default), metavar=setting.metavar, help=setting.doc + told)
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
    """Run a server until it is told to stop by SIGINT, SIGTERM or SIGHUP.

    Returns 0 if it was told and every request came to its end, 3 if requests had to be cut off, 1 if the server could
    not start or ended by itself.
    """
    from irminsul_backend.triton_io.server.addresses import PORTS, Ports
    from irminsul_backend.triton_io.server.launcher import (
        MODEL,
        last_words,
        raise_interrupt_twice,
        set_handlers,
        start_server,
    )

    set_handlers(raise_interrupt_twice)
    given = {name: value for name in SETTINGS if (value := getattr(args, name, None)) is not None}
    config = ServerConfig.from_env(given={**given, "log_level": "INFO" if args.verbose else "WARNING"})
    ports = Ports.from_env(**PORTS)
    ports = replace(ports, **{n: value for n in PORTS if (value := getattr(args, f"{n}_port")) is not None})
    server = None
    try:
        server = start_server(config, args.host, ports, args.verbose)
        name = os.path.basename(os.path.abspath(config.model))
        urls = ", ".join(f"{n} {server.host}:{getattr(server.ports, n)}" for n in PORTS)
        print(f"{MODEL} ready: model {name}, {urls}", flush=True)
        code = server.wait()
        server.stop()
        why = last_words(server.log) or "it left no message"
        print(f"irminsul: the server ended by itself with exit code {code}: {why}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0 if server is None else _end(server, config.drain_s)
    finally:
        if server is not None:
            server.stop()


def _end(server: Server, drain_s: float) -> int:
    """Let running requests finish; a second signal ends them."""
    from irminsul_backend.triton_io.server.supervisor import CUT_OFF_CODE

    try:
        if server.drain(drain_s):
            return 0
        limit = f"drain_s is {drain_s:g}"
    except KeyboardInterrupt:
        limit = "at the second signal"
    print(f"irminsul: running requests were cut off ({limit})", file=sys.stderr)
    return CUT_OFF_CODE


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
