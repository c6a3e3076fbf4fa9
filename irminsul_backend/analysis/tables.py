"""What a replay found, as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from irminsul_backend.analysis.causes import CAUSES
from irminsul_backend.analysis.estimate import Estimate
from irminsul_backend.analysis.results import ReplayResult

SHOWN_PROBLEMS = 5
NO_CAUSE = "(first prompts)"


def percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f}" if whole else "-"


def reuse_table(results: Sequence[ReplayResult], block: int) -> Table:
    """A row a file, scenario and preset; then, for several files, their mean and everything added up."""
    table = Table(title="Prompt tokens by where they come from, % of all", box=SIMPLE_HEAD)
    table.add_column("file")
    for name in ("scenario", "preset"):
        table.add_column(name)
    columns = ["prompts", "tokens", "exact", f"exact/{block}", "content", "computed", "segments"]
    with_bound = any(r.bound is not None for r in results)
    for name in (*columns, *(["bound"] if with_bound else [])):
        table.add_column(name, justify="right")
    for r in results:
        table.add_row(escape(Path(r.file).name), r.scenario, r.preset, *_mean([r], with_bound))
    if len({r.file for r in results}) > 1:
        for title, row in (("mean of files", _mean), ("all", _total)):
            table.add_section()
            for scenario, preset in dict.fromkeys((r.scenario, r.preset) for r in results):
                group = [r for r in results if (r.scenario, r.preset) == (scenario, preset)]
                table.add_row(title, scenario, preset, *row(group, with_bound))
    table.caption = (
        f"exact: longest prefix seen before, by token (in blocks of {block}); content: reused beyond it; segments: runs"
        " of it per prompt" + ("; bound: tokens beyond the prefix in a run of 32 seen before" if with_bound else "")
    )
    return table


def _shares(r: ReplayResult) -> list[float]:
    whole = max(1, r.tokens)
    return [100 * n / whole for n in (r.exact, r.exact_blocks, r.content, r.computed)]


def _mean(group: Sequence[ReplayResult], with_bound: bool) -> list[str]:
    """Each file counts the same."""
    shares = [sum(column) / len(group) for column in zip(*map(_shares, group), strict=True)]
    segments = sum(r.segments / max(1, len(r.prompts)) for r in group) / len(group)
    bounds = [100 * r.bound / max(1, r.tokens) for r in group if r.bound is not None]
    return _cells(group, shares, segments, sum(bounds) / len(bounds) if bounds else None, with_bound)


def _total(group: Sequence[ReplayResult], with_bound: bool) -> list[str]:
    """Each token counts the same."""
    tokens = max(1, sum(r.tokens for r in group))
    columns = zip(*map(_shares, group), strict=True)
    shares = [sum(s * r.tokens for s, r in zip(column, group, strict=True)) / tokens for column in columns]
    segments = sum(r.segments for r in group) / max(1, sum(len(r.prompts) for r in group))
    known = [r.bound for r in group if r.bound is not None]
    return _cells(group, shares, segments, 100 * sum(known) / tokens if known else None, with_bound)


def _cells(
    group: Sequence[ReplayResult], shares: Sequence[float], segments: float, bound: float | None, with_bound: bool
) -> list[str]:
    cells = [f"{sum(len(r.prompts) for r in group):,}", f"{sum(r.tokens for r in group):,}"]
    cells += [f"{share:.1f}" for share in shares]
    cells.append(f"{segments:.1f}")
    return [*cells, "-" if bound is None else f"{bound:.1f}"] if with_bound else cells


def of_one_preset(results: Sequence[ReplayResult]) -> list[ReplayResult]:
    """Those of `default`, or of the first preset: presets differ in what breaks cost, hardly in their causes."""
    presets = [r.preset for r in results]
    chosen = "default" if "default" in presets else presets[0]
    return [r for r in results if r.preset == chosen]


def causes_table(results: Sequence[ReplayResult]) -> Table:
    """Why prefixes broke, over all files, a section for each scenario and preset; costliest first."""
    table = Table(title="Why the prefix broke, and what a prefix cache loses by it", box=SIMPLE_HEAD)
    for name in ("scenario", "preset", "cause"):
        table.add_column(name)
    table.add_column("prompts", justify="right")
    table.add_column("tokens lost", justify="right")
    table.add_column("%", justify="right")
    table.add_column("break at", justify="right")
    for (scenario, preset), group in _by_run(results):
        tokens = sum(r.tokens for r in group)
        rows = []
        for name in CAUSES:
            found = [c for r in group for c in r.causes if c.name == name]
            if found:
                rows.append((sum(c.lost for c in found), sum(c.prompts for c in found), name))
        for lost, prompts, name in sorted(rows, reverse=True):
            at = median(b.position for r in group for b in r.breaks if b.cause == name)
            table.add_row(scenario, preset, name, f"{prompts:,}", f"{lost:,}", percent(lost, tokens), f"{at:,.0f}")
        first = sum(len(r.prompts) for r in group) - sum(prompts for _, prompts, _ in rows)
        rest = sum(r.content for r in group) - sum(lost for lost, _, _ in rows)
        table.add_row(scenario, preset, NO_CAUSE, f"{first:,}", f"{rest:,}", percent(rest, tokens), "-")
        table.add_section()
    table.caption = (
        "tokens lost: known tokens after the break, which content reuse gets back; %: of all prompt tokens; break at: "
        f"median position of the first token that differs; {NO_CAUSE}: what content reuse finds for first prompts of "
        "sessions, in other sessions; with it the tokens add up to content"
    )
    return table


def advice_lines(results: Sequence[ReplayResult]) -> RenderableType:
    """What to do about each cause that cost something, costliest first."""
    lost: Counter[str] = Counter()
    for r in results:
        for cause in r.causes:
            lost[cause.name] += cause.lost
    table = Table.grid(padding=(0, 2))
    for name, tokens in lost.most_common():
        if tokens:
            table.add_row(name, CAUSES[name])
    return table


def capacity_table(results: Sequence[ReplayResult]) -> Table:
    """Reuse at each cache size, the files one after the other in caches of their own."""
    table = Table(title="With eviction: % of prompt tokens at each cache size", box=SIMPLE_HEAD)
    for name in ("file", "scenario", "preset"):
        table.add_column(name)
    for name in ("capacity", "exact", "content", "computed"):
        table.add_column(name, justify="right")
    for r in results:
        for p in r.capacities:
            shares = [percent(n, r.tokens) for n in (p.exact, p.content, p.computed)]
            table.add_row(escape(Path(r.file).name), r.scenario, r.preset, f"{p.capacity:,}", *shares)
        if r.capacities:
            shares = [percent(n, r.tokens) for n in (r.exact, r.content, r.computed)]
            table.add_row(escape(Path(r.file).name), r.scenario, r.preset, "unlimited", *shares)
            table.add_section()
    return table


def estimate_table(results: Sequence[ReplayResult], estimates: Sequence[Estimate]) -> Table:
    table = Table(title="Estimated prefill work", box=SIMPLE_HEAD)
    for name in ("file", "scenario", "preset"):
        table.add_column(name)
    for name in ("PFLOP", "saved by exact", "by content", "s saved", "kJ saved"):
        table.add_column(name, justify="right")
    for r, e in zip(results, estimates, strict=True):
        saved = e.exact_flops + e.content_flops
        table.add_row(
            escape(Path(r.file).name),
            r.scenario,
            r.preset,
            f"{e.flops / 1e15:,.1f}",
            f"{e.exact_flops / 1e15:,.1f} ({percent(e.exact_flops, e.flops)}%)",
            f"{e.content_flops / 1e15:,.1f} ({percent(e.content_flops, e.flops)}%)",
            f"{e.seconds(saved):,.1f}",
            f"{e.joules(saved) / 1e3:,.1f}",
        )
    return table


def breaks_table(results: Sequence[ReplayResult], limit: int) -> Table:
    """The costliest breaks with their text; only for people who asked to see it."""
    table = Table(title=f"The {limit} costliest breaks", box=SIMPLE_HEAD)
    for name in ("file", "session"):
        table.add_column(name, no_wrap=True, max_width=18)
    for name in ("turn", "position", "cause", "lost"):
        table.add_column(name, no_wrap=True)
    for name in ("before", "was", "now"):
        table.add_column(name, overflow="fold")
    found = [(r, b) for r in results for b in r.breaks if b.lost]
    for r, b in sorted(found, key=lambda pair: -pair[1].lost)[:limit]:
        numbers = (str(b.turn), f"{b.position:,}", b.cause, f"{b.lost:,}")
        texts = (escape(repr(text)) for text in (b.before, b.was, b.now))
        table.add_row(escape(Path(r.file).name), escape(b.session), *numbers, *texts)
    return table


def problem_lines(problems: Iterable[str]) -> RenderableType:
    """The first problems and how many there are; nothing if there are none."""
    problems = list(problems)
    if not problems:
        return Group()
    shown = [escape(problem) for problem in problems[:SHOWN_PROBLEMS]]
    rest = len(problems) - len(shown)
    more = [f"... and {rest} more (all are in --json)"] if rest else []
    return Group(f"[yellow]{len(problems)} lines with problems:[/yellow]", *shown, *more)


def _by_run(results: Sequence[ReplayResult]) -> Iterable[tuple[tuple[str, str], list[ReplayResult]]]:
    ordered = sorted(results, key=lambda r: (r.scenario, r.preset))
    for key, group in groupby(ordered, key=lambda r: (r.scenario, r.preset)):
        yield key, list(group)
