"""What a report shows, as plain JSON values of bounded size: totals whole, time binned, prompts sampled.

Session ids and the tokens around a break are text of the prompts: they come in only where text may be shown.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import Any

from irminsul_backend.analysis.results import Break, Cause, PromptResult, ReplayResult

MAX_BINS = 300
ALL_BINS = 16_000
"""Bins of all results together; each gets at most `MAX_BINS` and at least `MIN_BINS`."""
MIN_BINS = 24
ALL_SEGMENTS = 130_000
"""Segments that are kept of all results together; a prompt counts as `PROMPT_COST` segments more."""
PROMPT_COST = 10
MAX_EXAMPLES = 3
ALL_EXAMPLES = 2_000
MAX_PROBLEMS = 100
ALL_PROBLEMS = 2_000
MAX_TEXT = 120
"""Characters of a piece of prompt text."""
MAX_SESSION = 64
"""Characters of a session id."""
MAX_LINE = 300
"""Characters of a cause's advice, a problem, a name."""
CAUSE_NAMES = {"header": "clock or nonce in the header"}
"""Words for a cause where its name alone does not say enough."""


def summarise(results: Sequence[ReplayResult], *, show_text: bool) -> dict[str, Any]:
    """Everything the page draws.

    Args:
        results: of any files, scenarios and presets, in the order in which they are to be listed.
        show_text: take in session ids and the tokens around breaks; else sessions are numbered in replay order.
    """
    names = short_names(r.file for r in results)
    kept = choose_prompts([r.prompts for r in results], ALL_SEGMENTS)
    count = max(len(results), 1)
    bins = max(MIN_BINS, min(MAX_BINS, ALL_BINS // count))
    examples = max(1, min(MAX_EXAMPLES, ALL_EXAMPLES // (8 * count)))
    return {
        "text": show_text,
        "results": [
            _result(r, names[r.file], indices, bins, examples, show_text)
            for r, indices in zip(results, kept, strict=True)
        ],
        "problems": _problems(results, names),
    }


def short_names(files: Iterable[str]) -> dict[str, str]:
    """Each file's name with as many folders as it takes to tell it from the others."""
    rest, names = list(dict.fromkeys(files)), {}
    depth = 1
    while rest:
        short = {f: "/".join(PurePath(f).parts[-depth:]) or f for f in rest}
        counts = Counter(short.values())
        done = {f for f in rest if counts[short[f]] == 1 or depth >= len(PurePath(f).parts)}
        names.update({f: short[f][-MAX_LINE:] for f in done})
        rest = [f for f in rest if f not in done]
        depth += 1
    return names


def bin_prompts(prompts: Sequence[PromptResult], most: int) -> list[list[int]]:
    """Runs of equally many prompts in order, at most `most`: [prompts, tokens, exact, content, computed] each."""
    size = max(1, -(-len(prompts) // most))
    result = []
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        sums = (sum(getattr(p, name) for p in part) for name in ("tokens", "exact", "content", "computed"))
        result.append([len(part), *sums])
    return result


def choose_prompts(lists: Sequence[Sequence[PromptResult]], budget: int) -> list[list[int]]:
    """Indices, ascending, of the prompts of each list that are kept whole, within `budget` segments in all.

    Lists that fit in an even share are kept whole and leave the rest of theirs to others.
    """
    costs = [[len(p.segments) + PROMPT_COST for p in prompts] for prompts in lists]
    result: list[list[int]] = [[] for _ in lists]
    left = budget
    for rank, i in enumerate(sorted(range(len(lists)), key=lambda i: sum(costs[i]))):
        share = left // (len(lists) - rank)
        result[i] = _sample(lists[i], costs[i], share)
        left -= sum(costs[i][k] for k in result[i])
    return result


def _sample(prompts: Sequence[PromptResult], costs: Sequence[int], budget: int) -> list[int]:
    """In turn the largest, that with most segments, and one of an even spread, while they fit."""
    n = len(prompts)
    if sum(costs) <= budget:
        return list(range(n))
    spread: list[int] = []
    step = n
    while step:
        spread += range(0, n, step)
        step //= 2
    rankings = (
        sorted(range(n), key=lambda k: -prompts[k].tokens),
        sorted(range(n), key=lambda k: -costs[k]),
        spread,
    )
    chosen: dict[int, None] = {}
    for candidates in zip(rankings[0], rankings[1], spread, strict=False):
        for k in candidates:
            if k not in chosen and costs[k] <= budget:
                chosen[k] = None
                budget -= costs[k]
    return sorted(chosen)


def _result(
    result: ReplayResult, name: str, kept: Sequence[int], bins: int, examples: int, show_text: bool
) -> dict[str, Any]:
    sessions = {s: i + 1 for i, s in enumerate(dict.fromkeys(p.session for p in result.prompts))}
    breaks: dict[tuple[str, int], list[Break]] = {}
    by_cause: dict[str, list[Break]] = {}
    for b in result.breaks:
        breaks.setdefault((b.session, b.turn), []).append(b)
        by_cause.setdefault(b.cause, []).append(b)
    prompts = []
    for k in kept:
        p = result.prompts[k]
        prompts.append(
            {
                "index": k,
                "session": sessions[p.session],
                "turn": p.turn,
                "tokens": p.tokens,
                "exact": p.exact,
                "content": p.content,
                "computed": p.computed,
                # Flat, as (position, length, δ, 1 if part of the exact prefix): most of the file's bytes are these.
                "segments": [int(x) for segment in p.segments for x in segment[:4]],
                "breaks": [
                    [b.position, cause_name(b.cause), b.lost]
                    for b in breaks.get((p.session, p.turn), [])[:MAX_EXAMPLES]
                ],
            }
        )
    shown = {p["session"] for p in prompts}
    causes = sorted(result.causes, key=lambda c: -c.lost)
    return {
        "file": name,
        "scenario": result.scenario,
        "preset": result.preset,
        "sessions": result.sessions or len(sessions),
        "prompts": len(result.prompts),
        "tokens": result.tokens,
        "exact": result.exact,
        "blocks": result.exact_blocks,
        "content": result.content,
        "computed": result.computed,
        "segments": result.segments,
        "bound": result.bound,
        "seconds": round(result.seconds, 6),
        "bins": bin_prompts(result.prompts, bins),
        "kept": prompts,
        "causes": [_cause(c, by_cause.get(c.name, []), sessions, examples, show_text) for c in causes],
        "capacities": [
            [c.capacity, c.exact, c.content, c.computed] for c in sorted(result.capacities, key=lambda c: c.capacity)
        ],
        "names": {i: _clip(s, MAX_SESSION) for s, i in sessions.items() if i in shown} if show_text else {},
    }


def cause_name(name: str) -> str:
    return CAUSE_NAMES.get(name, name.replace("_", " "))


def _cause(
    cause: Cause, breaks: Sequence[Break], sessions: dict[str, int], examples: int, show_text: bool
) -> dict[str, Any]:
    dearest = sorted(breaks, key=lambda b: -b.lost)[:examples]
    return {
        "name": cause_name(cause.name),
        "prompts": cause.prompts,
        "lost": cause.lost,
        "advice": _clip(cause.advice, MAX_LINE),
        "examples": [_example(b, sessions, show_text) for b in dearest],
    }


def _example(b: Break, sessions: dict[str, int], show_text: bool) -> dict[str, Any]:
    example: dict[str, Any] = {"turn": b.turn, "position": b.position, "lost": b.lost}
    example["session"] = sessions.get(b.session, 0)
    if show_text:
        example.update(before=_clip_left(b.before), was=_clip(b.was, MAX_TEXT), now=_clip(b.now, MAX_TEXT))
        example["name"] = _clip(b.session, MAX_SESSION)
    return example


def _problems(results: Sequence[ReplayResult], names: dict[str, str]) -> list[dict[str, Any]]:
    """Each file's problems once, however many results it has."""
    by_file: dict[str, dict[str, None]] = {}
    for r in results:
        by_file.setdefault(names[r.file], {}).update(dict.fromkeys(r.problems))
    found = {file: list(problems) for file, problems in by_file.items() if problems}
    most = max(1, min(MAX_PROBLEMS, ALL_PROBLEMS // max(len(found), 1)))
    return [
        {"file": file, "count": len(problems), "lines": [_clip(p, MAX_LINE) for p in problems[:most]]}
        for file, problems in found.items()
    ]


def _clip(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _clip_left(text: str) -> str:
    return text if len(text) <= MAX_TEXT else "…" + text[1 - MAX_TEXT :]
