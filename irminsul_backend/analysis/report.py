"""The report of an analysis: one HTML file that needs nothing else, neither network nor server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from irminsul_backend import __version__
from irminsul_backend.analysis.report_data import summarise
from irminsul_backend.analysis.results import ReplayResult

TITLE = "What this traffic can reuse"
STYLES = ("report.css",)
SCRIPTS = ("report_draw.js", "report.js")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
"""The browser itself keeps the page from loading or sending anything."""


def write_report(
    results: Sequence[ReplayResult], path: str | Path, *, show_text: bool = False, title: str = TITLE
) -> None:
    """Write `results` as a self-contained HTML page.

    Any mix of files, scenarios and presets; the page offers those that are there for choice. Its size is bounded
    (under 5 MB): time is binned, and segments are kept of a sample of the prompts where there are very many.

    Args:
        results: at least one.
        path: of the file; one that exists is replaced.
        show_text: show prompt text around breaks and session ids. Without it the file holds neither. File names,
            causes and problems are shown always.
        title: of the page.

    Raises:
        ValueError: no results.
        OSError: the file cannot be written.
    """
    if not results:
        raise ValueError("a report needs at least one result; none was given")
    data = {"version": __version__, **summarise(results, show_text=show_text)}
    # Text that was cut inside a character may hold half a surrogate pair, which UTF-8 cannot.
    Path(path).write_text(_page(data, title), encoding="utf-8", errors="replace")


def _page(data: dict[str, Any], title: str) -> str:
    style = "".join(_asset(name) for name in STYLES)
    script = "".join(_asset(name) for name in SCRIPTS)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="irminsul {escape(__version__)}">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>
{style}</style>
</head>
<body>
<header><p class="brand">irminsul analyze</p><h1>{escape(title)}</h1></header>
<main id="page"></main>
<noscript>
<p>The charts of this page need JavaScript, which is off or blocked here. The totals:</p>
{_plain_table(data["results"])}
</noscript>
<script type="application/json" id="data">{_inline_json(data)}</script>
<script>
{script}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("irminsul_backend.analysis").joinpath(name).read_text(encoding="utf-8")


def _inline_json(data: dict[str, Any]) -> str:
    """JSON that cannot end the script element it stands in, whatever strings it holds."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _plain_table(results: list[dict[str, Any]]) -> str:
    head = "<tr><th>file<th>scenario<th>preset<th>prompts<th>tokens<th>exact prefix<th>reused beyond it<th>computed"
    rows = []
    for r in results:
        shares = (f"<td>{100 * r[name] / max(r['tokens'], 1):.1f} %" for name in ("exact", "content", "computed"))
        names = (f"<td>{escape(r[name])}" for name in ("file", "scenario", "preset"))
        rows.append("<tr>" + "".join(names) + f"<td>{r['prompts']:,}<td>{r['tokens']:,}" + "".join(shares))
    return "<table>\n" + "\n".join([head, *rows]) + "\n</table>"
