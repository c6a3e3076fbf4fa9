"""Runs tests marked `interpreter` in one other process, with TRITON_INTERPRET=1.

Triton reads that variable when `@triton.jit` runs, so a process either interprets kernels or compiles them. The other
process is pytest as well: it sends its reports back, and they are shown here as if the tests had run in this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

REPORTS = "IRMINSUL_TEST_REPORTS"
"""Environment variable of the other process: the file that its reports go to."""

_reports_key = pytest.StashKey[dict[str, list[Any]]]()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    """Replay the other process's reports of a marked test instead of running it."""
    if REPORTS in os.environ or item.get_closest_marker("interpreter") is None:
        return None
    reports = item.session.stash.get(_reports_key, None)
    if reports is None:
        reports = item.session.stash[_reports_key] = _run_interpreted(item.session)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports[item.nodeid] or [_missing(item, reports[""])]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # fixtures of the tests before it that end here
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """In the other process: append the report to the file."""
    if REPORTS in os.environ:
        with Path(os.environ[REPORTS]).open("a") as file:
            file.write(json.dumps(report._to_json()) + "\n")


def _run_interpreted(session: pytest.Session) -> dict[str, list[Any]]:
    """Run all marked tests of this session; their reports by node id, and under "" what the process printed."""
    chosen = [item.nodeid for item in session.items if item.get_closest_marker("interpreter") is not None]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen]
    with tempfile.NamedTemporaryFile() as file:
        environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", REPORTS: file.name}
        done = subprocess.run(command, env=environment, cwd=session.config.rootpath, capture_output=True, text=True)
        lines = Path(file.name).read_text().splitlines()
    reports: dict[str, list[Any]] = defaultdict(list)
    for line in lines:
        report = pytest.TestReport._from_json(json.loads(line))
        reports[report.nodeid].append(report)
    reports[""] = [f"exit status {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"]
    return reports


def _missing(item: pytest.Item, output: list[str]) -> pytest.TestReport:
    message = f"the interpreter process ended without a report of this test; {output[0]}"
    return pytest.TestReport(item.nodeid, item.location, {}, "failed", message, "call")
