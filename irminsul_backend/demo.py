"""`irminsul demo`: one agent session, sent twice to a real server, without reuse and with content reuse."""

from __future__ import annotations

import argparse
import signal
from typing import Literal, NamedTuple

from irminsul_client import Client, Completion, Usage
from irminsul_client.scenarios import apply_scenario
from irminsul_client.synthetic import synthetic_sessions
from irminsul_client.traces import Message
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

TURNS = 6
MAX_TOKENS = 16

NEXT_STEPS = """\
[bold]Where to go next[/bold]
  irminsul serve                         the same server on ports 8000 (HTTP), 8001 (gRPC), 8002 (metrics)
  irminsul serve --model DIR             your DeepSeek-V2/V3-style checkpoint in Hugging Face form
  irminsul generate "Hello" --stream     one request from the command line
  irminsul replay TRACE --scenario early --reuse content     your own recorded prompts, measured
  make loadtest                          Locust users that replay agents over streaming gRPC
  README.md                              gRPC, HTTP, Docker, settings, what is reused and what is not
(The commands live in .venv/bin.)"""


class Turn(NamedTuple):
    """One turn's answers: reuse off, then content."""

    off: Completion
    content: Completion

    @property
    def usage(self) -> Usage:
        assert self.content.usage is not None, "the last response carries the usage"
        return self.content.usage

    @property
    def agreement(self) -> str:
        a, b = self.off.token_ids, self.content.token_ids
        if a == b:
            return "same"
        return f"differs from {next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y) + 1}"


def agent_prompts() -> list[tuple[Message, ...]]:
    """The whole prompt of each turn. A turn adds a tool result; a header with a request id and a clock comes in front
    of everything, documents and tools change places, and results older than the last four become stubs."""
    sessions = synthetic_sessions(1, turns=TURNS, tools=12, documents=6, sentences=16, seed=1)
    for scenario in ("prune", "reorder", "early"):
        sessions = apply_scenario(scenario, sessions)
    return list(next(sessions).turns)


def run(
    client: Client, prompts: list[tuple[Message, ...]], reuse: Literal["off", "content"], progress: Progress
) -> list[Completion]:
    """Send the turns of one session; its own salt keeps the two runs from helping each other."""
    with client.session(cache_salt=f"demo {reuse}") as session:
        return [
            session.generate(messages=prompt, reuse=reuse, max_tokens=MAX_TOKENS)
            for prompt in progress.track(prompts, description=f"reuse {reuse}")
        ]


def report(turns: list[Turn]) -> Table:
    table = Table(title="The same six turns twice: tokens by source, ms to the first token")
    for name in ("#", "prompt", "exact", "shifted", "computed", "off", "content", "faster", "answer"):
        table.add_column(name, justify="left" if name == "answer" else "right")
    for number, turn in enumerate(turns, 1):
        u, off, content = turn.usage, turn.off.ttft_ms, turn.content.ttft_ms
        table.add_row(
            str(number),
            f"{u.prompt_tokens:,}",
            f"{u.exact_tokens:,}",
            f"{u.shifted_tokens:,}",
            f"{u.computed_tokens:,}",
            f"{off:,.0f}",
            f"{content:,.0f}",
            f"{off / content:.1f}x",
            turn.agreement,
        )
    return table


def summary(turns: list[Turn]) -> str:
    total = sum(t.usage.prompt_tokens for t in turns)
    exact, shifted = sum(t.usage.exact_tokens for t in turns), sum(t.usage.shifted_tokens for t in turns)
    same = sum(t.agreement == "same" for t in turns)
    first, later = turns[0], turns[1:]
    speedup = sum(t.off.ttft_ms for t in later) / sum(t.content.ttft_ms for t in later)
    return (
        f"Of {total:,} prompt tokens {100 * exact / total:.1f} % were an unchanged prefix (all that a prefix cache can "
        f"reuse) and {100 * shifted / total:.1f} % were found at another place and reused there.\n"
        f"The first turn is cold ({first.off.ttft_ms:.0f} and {first.content.ttft_ms:.0f} ms). After it the first "
        f"token came {speedup:.1f} times sooner.\n"
        f"{same} of {len(turns)} greedy answers of {MAX_TOKENS} tokens are the same with and without reuse. Rows above "
        "layer 0 depend on the text before them, so content reuse is an approximation; the shipped model has random "
        "weights, so its text means nothing and agreement says little about a trained one."
    )


def main(args: argparse.Namespace) -> int:
    """Start a server with the configured model (default: the shipped one), run the session twice, print the table."""
    from irminsul_backend.triton_io.launcher import raise_interrupt, running_server

    console = Console()
    signal.signal(signal.SIGTERM, raise_interrupt)
    prompts = agent_prompts()
    console.print("Starting tritonserver with the shipped model (about 10 s) ...")
    with running_server() as server, Client(server.grpc_url) as client:
        client.generate(messages=prompts[0][:2], max_tokens=2, cache_salt="demo warm-up")
        with Progress(console=console, transient=True) as progress:
            off = run(client, prompts, "off", progress)
            content = run(client, prompts, "content", progress)
    turns = [Turn(a, b) for a, b in zip(off, content, strict=True)]
    console.print(report(turns))
    console.print(summary(turns), soft_wrap=True)
    console.print(NEXT_STEPS, highlight=False, soft_wrap=True)
    return 0
