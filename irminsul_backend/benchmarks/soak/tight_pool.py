"""Recorded prompts through a pool at a tenth of their working set: right answers, and the reuse that was foretold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from irminsul_client import Client, Completion, IrminsulClientError, Session

from irminsul_backend.analysis.readers import read_log
from irminsul_backend.analysis.simulation import ReplayOptions, Turn, replay
from irminsul_backend.analysis.tokens import PromptTokenizer
from irminsul_backend.benchmarks.soak.harness import Clock, Row, Soak, enough, share
from irminsul_backend.benchmarks.soak.serving import Watched
from irminsul_backend.chunking import PRESETS
from irminsul_backend.config import ServerConfig

FILES = ("rag_hotpot", "captain_multiagent", "sweagent")
MOST_AMPLE = 600_000
"""5.5 GB of the shipped model's rows; beyond that the larger pool is large, not unlimited."""
LEAST_CAPACITY = 20_000
POINTS = 5.0
TOKENS = 4


def tight_pool(soak: Soak) -> Iterator[Row]:
    """Each prompt goes to a tight and to an ample server, `exact` first; then `content` to a fresh tight one."""
    paths = [soak.traces / f"{name}.jsonl.zst" for name in FILES]
    if missing := [path for path in paths if not path.exists()]:
        yield Row("recorded prompts", "in --traces", f"skipped: {missing[0]} is not there", True)
        return
    wanted = soak.count(2000, least=40)
    turns = _turns(soak, wanted)
    tokenizer = PromptTokenizer.load(None)
    whole = replay(turns, [PRESETS["default"]], tokenizer, ReplayOptions(), file="", scenario="asis")[0]
    capacity = max(LEAST_CAPACITY, whole.computed // 10, max(p.tokens for p in whole.prompts) + 200)
    soak.say(f"{len(turns):,} prompts, working set {whole.computed:,} tokens, pool {capacity:,}")
    config = ServerConfig(log_level="WARNING", capacity_tokens=capacity)
    ample = ServerConfig(log_level="WARNING", capacity_tokens=max(2 * capacity, min(MOST_AMPLE, whole.computed * 2)))
    with Watched(soak, "tight", config) as tight, Watched(soak, "ample", ample) as roomy:
        clock = Clock(soak.seconds(140, least=25))
        equal = different = 0
        failed: list[str] = []
        here, there = Sessions(tight.grpc, "exact"), Sessions(roomy.grpc, "exact")
        for turn in turns:
            if not clock.running:
                break
            try:
                same = here.ask(turn, TOKENS).token_ids == there.ask(turn, TOKENS).token_ids
            except IrminsulClientError as error:
                failed.append(f"{type(error).__name__}: {error}"[:120])
                continue
            equal, different = equal + same, different + (not same)
            if clock.due():
                soak.say(f"exact: {equal + different:,} of {len(turns):,}")
        here.close()
        there.close()
        measured = f"{share(equal + different, wanted)}: {different} differ, {len(failed)} failed {failed[:1] or ''}"
        good = not different and not failed and enough(equal, wanted)
        what = f"`exact` in {capacity:,} slots"
        yield Row(what, f"equal to answers from {ample.capacity_tokens:,} slots", measured, good)
    yield from _reuse_row(soak, turns, wanted, capacity, tokenizer)


def _reuse_row(soak: Soak, turns: list[Turn], wanted: int, capacity: int, tokenizer: PromptTokenizer) -> Iterator[Row]:
    clock = Clock(soak.seconds(80, least=20))
    served: list[Any] = []
    with Watched(soak, "tight", ServerConfig(log_level="WARNING", capacity_tokens=capacity)) as watched:
        sessions = Sessions(watched.grpc, "content")
        for turn in turns:
            if not clock.running:
                break
            served.append(sessions.ask(turn, 1).usage)
            if clock.due():
                soak.say(f"content: {len(served):,} of {len(turns):,}")
        sessions.close()
    options = ReplayOptions(capacities=(capacity,))
    foretold = replay(turns[: len(served)], [PRESETS["default"]], tokenizer, options, file="", scenario="asis")[0]
    point = foretold.capacities[0]
    there = 100 * (point.exact + point.content) / max(1, point.exact + point.content + point.computed)
    here = 100 * sum(u.exact_tokens + u.shifted_tokens for u in served) / max(1, sum(u.prompt_tokens for u in served))
    measured = (
        f"{share(len(served), wanted)}: {here:.1f} % served, {there:.1f} % by irminsul analyze --capacity {capacity}"
    )
    close = abs(here - there) <= POINTS
    yield Row("reuse in a tight pool", f"within {POINTS:g} points", measured, close and enough(len(served), wanted))


def _turns(soak: Soak, wanted: int) -> list[Turn]:
    """Prompts of the files one after the other, as `irminsul analyze` orders them."""
    turns: list[Turn] = []
    for name in FILES:
        log = read_log(soak.traces / f"{name}.jsonl.zst")
        for session, turn in log.order:
            recorded = log.sessions[session]
            turns.append(Turn(f"{name} {recorded.session_id}", turn, recorded.turns[turn]))
    return turns[:wanted]


class Sessions:
    """The sessions of a replay on one server, each prompt sent when the one before it is answered."""

    def __init__(self, url: str, reuse: Any) -> None:
        self._client = Client(url, timeout=120)
        self._reuse = reuse
        self._open: dict[str, Session] = {}

    def ask(self, turn: Turn, tokens: int) -> Completion:
        session = self._open.setdefault(turn.session, self._client.session(turn.session[-100:]))
        return session.generate(
            messages=list(turn.messages), max_tokens=tokens, reuse=self._reuse, ignore_eos=tokens > 1
        )

    def close(self) -> None:
        self._client.close()
