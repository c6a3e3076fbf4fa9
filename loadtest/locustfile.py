"""Locust users that behave as agents do: each replays one session after the other over streaming gRPC.

    locust -f loadtest/locustfile.py --headless --users 8 --run-time 30s --host localhost:8001

Without --host the server is the one that IRMINSUL_URL names, or localhost:8001.

Statistics rows: `grpc turn` whole requests (ms), `time first token` and `time between tokens` (ms), and `tokens exact`,
`tokens shifted`, `tokens computed`, whose "response time" columns count prompt tokens a request.
"""

from __future__ import annotations

import itertools
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import gevent
import grpc.experimental.gevent
from irminsul_client import Client, IrminsulClientError, ServerUnavailable, Session
from irminsul_traffic.scenarios import SCENARIOS, apply_scenario
from irminsul_traffic.synthetic import synthetic_sessions
from irminsul_traffic.traces import Message, TraceError, TraceSession, read_trace
from locust import User, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from rich.console import Console
from rich.table import Table

# Locust has patched threads and sockets by now; gRPC's core does its own I/O and would block every other user.
grpc.experimental.gevent.init_gevent()

SOURCES = ("exact", "shifted", "computed")
SYNTHETIC_SESSIONS = 64
RETRY_PAUSE = 1.0
"""Seconds; a user does not hammer a server that is gone."""


@events.init_command_line_parser.add_listener
def add_arguments(parser: LocustArgumentParser) -> None:
    """Our own options; each can also be set by its environment variable."""
    group = parser.add_argument_group("Irminsul")
    group.add_argument("--trace", env_var="IRMINSUL_TRACE", default="", help="trace file; none: sessions made here")
    group.add_argument("--scenario", env_var="IRMINSUL_SCENARIO", default="early", choices=list(SCENARIOS))
    group.add_argument("--reuse", env_var="IRMINSUL_REUSE", default="content", choices=["off", "exact", "content"])
    group.add_argument("--max-tokens", env_var="IRMINSUL_MAX_TOKENS", type=int, default=16)
    group.add_argument("--think-time", env_var="IRMINSUL_THINK_TIME", type=float, default=0.2, help="mean seconds")
    group.add_argument(
        "--request-timeout", env_var="IRMINSUL_REQUEST_TIMEOUT", type=float, default=120.0, help="seconds"
    )
    group.add_argument("--trace-seed", type=int, default=0, help="of the sessions made here")


def load_sessions(options: Any) -> list[TraceSession]:
    """The sessions that the users take turns with. Raises TraceError for a broken trace."""
    made = synthetic_sessions(SYNTHETIC_SESSIONS, seed=options.trace_seed)
    recorded = read_trace(options.trace) if options.trace else made
    return list(apply_scenario(options.scenario, recorded))


@events.init.add_listener
def prepare(environment: Environment, **_: Any) -> None:
    """Read the sessions and, without a web page to name another host, look for the server; exit if either fails."""
    options: Any = environment.parsed_options
    try:
        AgentUser.sessions = itertools.cycle(load_sessions(options))
        if options.headless:
            with Client(environment.host) as client:
                client.check_ready()
    except (IrminsulClientError, TraceError) as error:
        sys.exit(f"load test: {error}")


@events.test_start.add_listener
def start(environment: Environment, **_: Any) -> None:
    """Open one client for all users of this process."""
    options: Any = environment.parsed_options
    AgentUser.client = Client(environment.host, timeout=options.request_timeout)


@events.test_stop.add_listener
def stop(environment: Environment, **_: Any) -> None:
    """Close the client."""
    AgentUser.client.close()


class AgentUser(User):
    """One agent: the turns of a session in order, with some thinking in between, then the next session."""

    client: Client
    sessions: Iterator[TraceSession]

    def wait_time(self) -> float:
        """Seconds between two turns, at random around the mean."""
        mean = self.environment.parsed_options.think_time
        return float(between(0.5 * mean, 1.5 * mean)(self))

    @task
    def run_session(self) -> None:
        """Replay the next session from its first turn to its last."""
        recorded = next(self.sessions)
        with self.client.session(f"load-{uuid.uuid4()}") as session:
            for number, messages in enumerate(recorded.turns):
                if number:
                    self.wait()
                self.run_turn(session, messages, end=number == len(recorded.turns) - 1)

    def run_turn(self, session: Session, messages: Sequence[Message], end: bool) -> None:
        """Send one turn and record its times and tokens, or its error."""
        options = self.environment.parsed_options
        begin = time.perf_counter()
        try:
            answer = session.generate(messages=messages, max_tokens=options.max_tokens, reuse=options.reuse, end=end)
        except IrminsulClientError as error:
            self.fire("grpc", "turn", (time.perf_counter() - begin) * 1e3, error=error)
            if isinstance(error, ServerUnavailable):
                gevent.sleep(RETRY_PAUSE)
            return
        self.fire("grpc", "turn", answer.total_ms, size=len(answer.text.encode()))
        self.fire("time", "first token", answer.ttft_ms)
        for gap in answer.inter_token_ms:
            self.fire("time", "between tokens", gap)
        if answer.usage is not None:
            for source in SOURCES:
                self.fire("tokens", source, getattr(answer.usage, f"{source}_tokens"))

    def fire(self, kind: str, name: str, value: float, size: int = 0, error: IrminsulClientError | None = None) -> None:
        """One entry of a statistics row; ``value`` is ms, or tokens for the rows of kind ``tokens``."""
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=value, response_length=size, exception=error, context={}
        )


@events.quitting.add_listener
def print_tokens(environment: Environment, **_: Any) -> None:
    """The table at the end: which share of the prompt tokens came from where."""
    totals = {source: environment.stats.get(source, "tokens").total_response_time for source in SOURCES}
    prompt = sum(totals.values())
    table = Table(title="Prompt tokens by source")
    for column in ("source", "tokens", "share"):
        table.add_column(column, justify="left" if column == "source" else "right")
    for source, count in totals.items():
        table.add_row(source, f"{count:,.0f}", f"{count / prompt:.1%}" if prompt else "-")
    table.add_row("all", f"{prompt:,.0f}", "")
    Console(stderr=True).print(table)  # Locust's own tables go there too; with --json, standard output is JSON
