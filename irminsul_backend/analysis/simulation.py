"""Prompts through the real chunker and planner, in an unlimited cache and in caches of given sizes, without a model."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

import numpy as np
from irminsul_traffic.traces import Message

from irminsul_backend.analysis.causes import CAUSES, Part, classify, likeness, parts_of
from irminsul_backend.analysis.results import Break, CapacityPoint, Cause, PromptResult, ReplayResult
from irminsul_backend.analysis.tokens import Prompt, PromptTokenizer
from irminsul_backend.cache import POLICIES, CachedSequence, PICache, Registry, Segment, plan
from irminsul_backend.cache.bound import GramBound
from irminsul_backend.chunking import Preset, cut, fingerprint
from irminsul_backend.chunking.cutting import common_prefix
from irminsul_backend.errors import CapacityError

NAMESPACE = "analysis"
REMEMBERED_TURNS = 4
"""Former prompts of a session among which the most similar one is looked for."""
BATCH = 32
"""Prompts tokenised at once."""
GREW = "new_text"
"""The cause that stands for none."""
CONTEXT_TOKENS = 12
"""Shown on either side of a break."""


class Turn(NamedTuple):
    """One prompt of a replay, in the order in which they come."""

    session: str
    turn: int
    messages: Sequence[Message]


class ReuseCount(NamedTuple):
    """Reused tokens of one prompt: of the exact prefix, by content, and the segments that hold them."""

    exact: int
    content: int
    segments: tuple[tuple[int, int, int, bool], ...]


def count_reuse(segments: Sequence[Segment]) -> ReuseCount:
    """Tokens of the exact prefix and beyond it, and the segments as `PromptResult` has them."""
    exact = sum(s.end - s.start for s in segments if s.exact)
    content = sum(s.end - s.start for s in segments if not s.exact)
    return ReuseCount(exact, content, tuple((s.start, s.end - s.start, s.delta, s.exact) for s in segments))


class UnlimitedCache:
    """Every prompt stays a donor, as far as it can still give something. Slots and rows do not exist here."""

    def __init__(self, preset: Preset) -> None:
        self._preset = preset
        self._registry = Registry(preset.s1_window)
        self._last_of_session: dict[str, CachedSequence] = {}
        self._generation = np.zeros(0, np.int16)
        self._no_slots = np.empty(0, np.int32)

    def add(self, session: str, ids: np.ndarray, ends: np.ndarray, fingerprints: np.ndarray) -> list[Segment]:
        """Plan a prompt against all former ones, then keep it."""
        known = self._last_of_session.get(session)
        segments = plan(
            self._registry,
            NAMESPACE,
            ids,
            ends,
            fingerprints,
            policy=POLICIES["content"],
            extension=self._preset.extension,
            min_segment=self._preset.min_segment,
            gram=self._preset.gram,
            also_try=[known] if known else [],
        )
        if len(ids) > len(self._generation):
            self._generation = np.zeros(2 * len(ids), np.int16)
        sequence = CachedSequence(
            NAMESPACE,
            session,
            ids,
            self._no_slots,
            self._generation[: len(ids)],
            ends,
            fingerprints,
            gram=self._preset.gram,
            length=len(ids),
        )
        self._registry.publish(sequence)
        self._last_of_session[session] = sequence
        if segments and segments[0].exact and segments[0].end == segments[0].donor.length:
            self._registry.forget(segments[0].donor)  # it lies whole inside the new one
        return segments


class LimitedCache:
    """The engine's cache of a given number of slots, with eviction; a prompt ends before the next one comes."""

    def __init__(self, preset: Preset, capacity: int) -> None:
        self._cache = PICache(capacity, preset)
        self._capacity = capacity
        self._exact = self._content = self._computed = 0

    def add(self, session: str, ids: np.ndarray, ends: np.ndarray, fingerprints: np.ndarray) -> list[Segment]:
        """Admit, compute and retire one prompt. One that is longer than the cache is computed and not kept."""
        try:
            admission = self._cache.admit(
                ids, ends, fingerprints, namespace=NAMESPACE, session_id=session, policy=POLICIES["content"], max_new=0
            )
        except CapacityError:
            admission = None
        if admission is None:
            self._computed += len(ids)
            return []
        self._cache.advance(admission.sequence, len(ids))
        self._cache.retire(admission.sequence)
        count = count_reuse(admission.segments)
        self._exact += count.exact
        self._content += count.content
        self._computed += len(ids) - count.exact - count.content
        return admission.segments

    def point(self) -> CapacityPoint:
        return CapacityPoint(self._capacity, self._exact, self._content, self._computed)


class _Former(NamedTuple):
    parts: list[Part]
    ids: np.ndarray


class FoundBreak(NamedTuple):
    """Where a prompt left former ones of its session, with nothing lost so far."""

    nearest: Break
    """From the most similar one."""
    latest: Break | None
    """From the latest one, where the nearest has no cause and the latest holds messages that the nearest lacks."""

    def with_loss(self, lost: int) -> Break:
        """What only grew loses nothing; if tokens were lost all the same, the prompt in between was another one."""
        return replace(self.latest if self.latest and lost else self.nearest, lost=lost)


class BreakFinder:
    """Compares each prompt with the most similar one of its session, and with the latest where that says more."""

    def __init__(self, tokenizer: PromptTokenizer, show_text: bool) -> None:
        self._tokenizer = tokenizer
        self._show_text = show_text
        self._former: dict[str, deque[_Former]] = {}

    def find(self, turn: Turn, prompt: Prompt) -> FoundBreak | None:
        """None for the first prompt of a session."""
        current = _Former(parts_of(turn.messages), prompt.ids)
        remembered = self._former.setdefault(turn.session, deque(maxlen=REMEMBERED_TURNS))
        found = None
        if remembered:
            former = max(reversed(remembered), key=lambda f: likeness(f.parts, current.parts))
            nearest, latest = self._compare(turn, former, current), None
            if nearest.cause == GREW and set(remembered[-1].parts).intersection(current.parts).difference(former.parts):
                latest = self._compare(turn, remembered[-1], current)
            found = FoundBreak(nearest, latest)
        remembered.append(current)
        return found

    def _compare(self, turn: Turn, former: _Former, current: _Former) -> Break:
        at = common_prefix(former.ids, current.ids)
        shown = self._texts(former.ids, current.ids, at) if self._show_text else {}
        return Break(turn.session, turn.turn, at, classify(former.parts, current.parts), 0, **shown)

    def _texts(self, former: np.ndarray, ids: np.ndarray, at: int) -> dict[str, str]:
        decode, after = self._tokenizer.decode, at + CONTEXT_TOKENS
        return {
            "before": decode(ids[max(0, at - CONTEXT_TOKENS) : at]),
            "was": decode(former[at:after]),
            "now": decode(ids[at:after]),
        }


@dataclass(frozen=True)
class ReplayOptions:
    """What a replay computes."""

    block: int = 16
    capacities: tuple[int, ...] = ()
    bound: bool = False
    """Whether to compute the upper bound of runs of 32 tokens."""
    show_text: bool = False

    def passes(self, presets: int) -> int:
        """The number of times a replay goes through all prompts."""
        return 1 + presets * (1 + len(self.capacities)) + self.bound


def _nothing(prompts: int) -> None:
    pass


def replay(
    turns: Iterable[Turn],
    presets: Sequence[Preset],
    tokenizer: PromptTokenizer,
    options: ReplayOptions,
    *,
    file: str,
    scenario: str,
    problems: Sequence[str] = (),
    on_step: Callable[[int], None] = _nothing,
) -> list[ReplayResult]:
    """Replay prompts in order, through one preset after the other, so that only one cache is in memory.

    Args:
        on_step: is told how many prompts a pass has gone on by; see `ReplayOptions.passes`.

    Returns:
        One result a preset, in order.
    """
    known: list[tuple[str, Prompt]] = []
    places: list[tuple[str, int]] = []
    breaks: dict[int, FoundBreak] = {}
    finder = BreakFinder(tokenizer, options.show_text)
    waiting = iter(turns)
    while batch := list(islice(waiting, BATCH)):
        for turn, prompt in zip(batch, tokenizer.encode([t.messages for t in batch]), strict=True):
            found = finder.find(turn, prompt)
            if found is not None:
                breaks[len(known)] = found
            known.append((turn.session, prompt))
            places.append((turn.session, turn.turn))
        on_step(len(batch))
    del finder

    results = []
    for preset in presets:
        result = ReplayResult(file, scenario, preset.name, problems=list(problems))
        result.sessions = len({session for session, _ in places})
        begin = time.thread_time()
        cache = UnlimitedCache(preset)
        counts = [count_reuse(segments) for segments in _passed(known, preset, cache, on_step)]
        result.seconds = time.thread_time() - begin
        del cache
        for place, (_, prompt), count in zip(places, known, counts, strict=True):
            result.prompts.append(_prompt_result(*place, len(prompt.ids), count, options.block))
        result.breaks = [found.with_loss(counts[at].content) for at, found in breaks.items()]
        result.causes = _causes(result.breaks)
        for capacity in options.capacities:
            limited = LimitedCache(preset, capacity)
            for _ in _passed(known, preset, limited, on_step):
                pass
            result.capacities.append(limited.point())
        results.append(result)
    if options.bound and results:
        bound = _bound([prompt.ids for _, prompt in known], [p.exact for p in results[0].prompts], on_step)
        for result in results:
            result.bound = bound
    return results


def _passed(
    prompts: Sequence[tuple[str, Prompt]],
    preset: Preset,
    cache: UnlimitedCache | LimitedCache,
    on_step: Callable[[int], None],
) -> Iterator[Sequence[Segment]]:
    """Cut each prompt and put it through the cache."""
    for number, (session, prompt) in enumerate(prompts, 1):
        ends = cut(prompt.ids, preset, prompt.cuts(preset))
        yield cache.add(session, prompt.ids, ends, fingerprint(prompt.ids, ends, NAMESPACE, preset.gram))
        if number % BATCH == 0:
            on_step(BATCH)
    on_step(len(prompts) % BATCH)


def _prompt_result(session: str, turn: int, tokens: int, count: ReuseCount, block: int) -> PromptResult:
    return PromptResult(
        session=session,
        turn=turn,
        tokens=tokens,
        exact=count.exact,
        exact_blocks=count.exact // block * block,
        content=count.content,
        computed=tokens - count.exact - count.content,
        segments=count.segments,
    )


def _causes(breaks: Sequence[Break]) -> list[Cause]:
    """Costliest first; without advice where nothing was lost."""
    causes = []
    for name, advice in CAUSES.items():
        lost = [b.lost for b in breaks if b.cause == name]
        if lost:
            causes.append(Cause(name, len(lost), sum(lost), advice if sum(lost) else ""))
    return sorted(causes, key=lambda cause: -cause.lost)


def _bound(prompts: Sequence[np.ndarray], exact: Sequence[int], on_step: Callable[[int], None]) -> int:
    bound, known = GramBound(), 0
    for ids, start in zip(prompts, exact, strict=True):
        known += bound.count(ids, start)
        bound.add(ids)
        on_step(1)
    return known
