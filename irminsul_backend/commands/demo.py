"""`irminsul demo`: an agent's questions to a real server, each sent twice, without reuse and with content reuse."""

from __future__ import annotations

import argparse
import signal
from typing import Literal, NamedTuple

from irminsul_client import Client, Completion, Usage
from irminsul_traffic.facts import NeedleMaker, Question, questions
from irminsul_traffic.scenarios import apply_scenario
from irminsul_traffic.traces import Message, TraceSession
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

TURNS = 6
TOOLS, DOCUMENTS, FACTS, FILLERS = 8, 8, 56, 72
MAX_TOKENS = 6

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
    """One question and its answers: reuse off, then content."""

    question: Question
    off: Completion
    content: Completion

    @property
    def usage(self) -> Usage:
        assert self.content.usage is not None, "the last response carries the usage"
        return self.content.usage


def is_right(question: Question, completion: Completion) -> bool:
    """A reply to a multi-hop question names the bridge, then the answer."""
    return completion.text.split()[-1:] == [question.answer]


def agent_session() -> tuple[list[Question], list[tuple[Message, ...]]]:
    """The question and the whole prompt of each turn.

    A turn adds a tool result and asks something that one or two of the documents tell. A header with a request id and a
    clock comes in front of everything, documents and tools change places, and results older than the last four become
    stubs.
    """
    maker = NeedleMaker("demo")
    facts = maker.facts(FACTS, DOCUMENTS)
    single, multi = (maker.random.sample(pool, TURNS) for pool in questions(facts))
    asked = [(single, multi)[turn % 2][turn] for turn in range(TURNS)]
    messages: list[Message] = [{"role": "system", "content": maker.filler.policy()}]
    messages += [{"role": "tool_schema", "content": maker.filler.tool_schema()} for _ in range(TOOLS)]
    messages += [{"role": "doc", "content": text} for text in maker.documents(facts, DOCUMENTS, FILLERS)]
    messages.append({"role": "user", "content": "Read the documents and call the tools, then answer my questions."})
    turns = []
    for question in asked:
        turns.append((*messages, {"role": "user", "content": question.text}))
        messages.append({"role": "tool", "content": maker.filler.log()})
    sessions = iter([TraceSession("demo", tuple(turns))])
    for scenario in ("prune", "reorder", "early"):
        sessions = apply_scenario(scenario, sessions)
    return asked, list(next(sessions).turns)


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
    table = Table(title="Tokens of each prompt by source, ms to the first token")
    for name in ("#", "prompt", "exact", "shifted", "computed", "off", "content", "faster"):
        table.add_column(name, justify="right")
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
        )
    return table


def answers(turns: list[Turn]) -> Table:
    table = Table(title="The replies; where two documents are needed, the first one's word comes first")
    for name in ("#", "question", "right reply", "off", "content"):
        table.add_column(name)
    for number, turn in enumerate(turns, 1):
        given = [
            "right" if is_right(turn.question, one) else f"[red]{escape(one.text.strip()) or '(nothing)'}[/]"
            for one in (turn.off, turn.content)
        ]
        table.add_row(str(number), turn.question.text, turn.question.reply.strip(), *given)
    return table


def summary(turns: list[Turn]) -> str:
    total = sum(t.usage.prompt_tokens for t in turns)
    exact, shifted = sum(t.usage.exact_tokens for t in turns), sum(t.usage.shifted_tokens for t in turns)
    off = sum(is_right(turn.question, turn.off) for turn in turns)
    content = sum(is_right(turn.question, turn.content) for turn in turns)
    first, later = turns[0], turns[1:]
    speedup = sum(t.off.ttft_ms for t in later) / sum(t.content.ttft_ms for t in later)
    return (
        f"Of {total:,} prompt tokens {100 * exact / total:.1f} % were an unchanged prefix (all that a prefix cache can "
        f"reuse) and {100 * shifted / total:.1f} % were found at another place and reused there.\n"
        f"The first turn is cold ({first.off.ttft_ms:.0f} and {first.content.ttft_ms:.0f} ms). After it the first "
        f"token came {speedup:.1f} times sooner.\n"
        f"Right answers: {off} of {len(turns)} without reuse, {content} of {len(turns)} with it. The shipped model was "
        "trained for such questions and for nothing else. Rows above layer 0 depend on the text before them, so "
        "content reuse is an approximation; `irminsul eval needle` measures what it costs."
    )


def main(args: argparse.Namespace) -> int:
    """Start a server with the configured model (default: the shipped one), run the session twice, print the table."""
    from irminsul_backend.triton_io.server.launcher import raise_interrupt, running_server

    console = Console()
    signal.signal(signal.SIGTERM, raise_interrupt)
    asked, prompts = agent_session()
    console.print("Starting tritonserver with the shipped model (about 10 s) ...")
    with running_server() as server, Client(server.grpc_url) as client:
        client.generate(messages=prompts[0][:2], max_tokens=2, cache_salt="demo warm-up")
        with Progress(console=console, transient=True) as progress:
            off = run(client, prompts, "off", progress)
            content = run(client, prompts, "content", progress)
    turns = [Turn(*turn) for turn in zip(asked, off, content, strict=True)]
    console.print(report(turns))
    console.print(answers(turns))
    console.print(summary(turns), soft_wrap=True)
    console.print(NEXT_STEPS, highlight=False, soft_wrap=True)
    return 0
