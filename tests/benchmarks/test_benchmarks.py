"""The benchmarks run and say what they measured; what they find depends on the machine, so no figure is judged."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import pytest
from rich.progress import Progress

from irminsul_backend.benchmarks import __main__ as benchmarks
from irminsul_backend.benchmarks import sampling
from irminsul_backend.triton_io.server import with_server
from irminsul_backend.triton_io.server.launcher import Server

CACHED = 200_000


@pytest.fixture
def progress() -> Iterator[Progress]:
    with Progress(disable=True) as shown:
        yield shown


@pytest.fixture
def bench(server: Server, progress: Progress) -> Iterator[benchmarks.Bench]:
    bench = benchmarks.Bench(server, progress)
    yield bench
    bench.client.close()


def test_planning_indexes_every_cached_token(progress: Progress) -> None:
    figures = benchmarks.planning(progress, repeats=1, cached=CACHED)
    assert figures["cut_and_fingerprint_ms"] > 0
    assert figures["plan_ms"] > 0


def test_bookkeeping_checks_the_pool_in_parts(progress: Progress) -> None:
    figures = benchmarks.bookkeeping(progress, cached=CACHED, piece=50_000)
    assert figures["calls_a_pass"] >= 1
    assert figures["reserve_worst_ms"] * 1000 >= figures["reserve_us_per_token"] > 0


def test_sampling_times_every_case(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["sampling", "--sequences=2", "--vocab=300"])
    monkeypatch.setattr(sampling, "ROUNDS", 1)
    sampling.main()
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row[:40].strip() for row in rows] == list(sampling.CASES)


@pytest.mark.server
def test_a_shifted_prompt_is_reused_and_compared(bench: benchmarks.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmarks, "PROMPT_TOKENS", 1024)
    monkeypatch.setattr(benchmarks, "KNOWN_TOKENS", 900)
    figures = bench.shifted(repeats=1)
    assert figures["shifted_tokens"] > 0.8 * benchmarks.KNOWN_TOKENS
    assert figures["ratio"] == figures["ttft_off_ms"] / figures["ttft_content_ms"]


@pytest.mark.server
def test_a_stream_is_compared_with_the_engine_alone(bench: benchmarks.Bench) -> None:
    figures = bench.stream(repeats=3, tokens=8)
    added = figures["served_ms_per_token"] - figures["in_process_ms_per_token"]
    assert math.isfinite(added)
    assert figures["added_quartiles_ms"][0] <= figures["added_quartiles_ms"][1]


@pytest.mark.server
def test_a_command_gets_a_server_and_gives_its_exit_code() -> None:
    asks = "import os, sys; from irminsul_client import Client; client = Client(os.environ['IRMINSUL_URL']); "
    asks += "sys.exit(6 + client.generate(text='x', max_tokens=1).usage.completion_tokens)"
    assert with_server.main([sys.executable, "-c", asks]) == 7
