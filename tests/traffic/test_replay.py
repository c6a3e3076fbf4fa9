"""Replaying traces, and the ``replay`` command, against a small gRPC server and a real tritonserver."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from irminsul_client import Client
from irminsul_traffic.cli import main
from irminsul_traffic.replay import ReplayOptions, TurnRecord, replay, server_session_id, summarise
from irminsul_traffic.scenarios import apply_scenario
from irminsul_traffic.synthetic import synthetic_sessions
from irminsul_traffic.traces import TraceError, TraceSession


def session(name: str, *texts: str) -> TraceSession:
    return TraceSession(name, tuple(({"role": "user", "content": text},) for text in texts))


def write(path: Path, sessions: list[TraceSession]) -> str:
    rows = [{"session_id": s.session_id, "turns": [{"messages": list(t)} for t in s.turns]} for s in sessions]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


SESSIONS = [session(f"s{i}", *(f"s{i} turn {t}" for t in range(1 + i % 3))) for i in range(7)]


class TestReplay:
    @pytest.mark.parametrize("at_once", [1, 3, 20])
    def test_every_turn_once_in_order_with_start_and_end(self, ensemble: Any, at_once: int) -> None:
        shown: list[TurnRecord] = []
        with Client(ensemble.address) as client:
            records = replay(client, SESSIONS, ReplayOptions(sessions=at_once, max_tokens=3), shown.append)
        assert [(r.session, r.turn) for r in records] == [
            (s.session_id, t) for s in SESSIONS for t in range(len(s.turns))
        ]
        assert sorted(map(repr, shown)) == sorted(map(repr, records))
        assert [r.text for r in records] == [f"s{i} turn {t} " for i in range(7) for t in range(1 + i % 3)]
        assert all((r.exact_tokens, r.shifted_tokens, r.computed_tokens, r.error) == (2, 3, 4, None) for r in records)
        assert ensemble.most_running <= at_once
        by_session = defaultdict(list)
        for seen in ensemble.seen:
            by_session[seen.session_id].append((seen.start, seen.end))
        flags = sorted(map(repr, by_session.values()))
        expected = [[(t == 0, t == i % 3) for t in range(1 + i % 3)] for i in range(7)]
        assert flags == sorted(map(repr, expected))

    def test_an_error_is_recorded_and_the_session_goes_on(self, ensemble: Any) -> None:
        sessions = [session("a", "one", "invalid", "three"), session("b", "invalid"), session("c", "fine")]
        with Client(ensemble.address) as client:
            records = replay(client, sessions, ReplayOptions())
        assert [r.error is not None for r in records] == [False, True, False, True, False]
        assert records[1].error == "InvalidRequest: max_tokens is 0; it must be at least 1"
        assert records[1].prompt_tokens is None
        summary = summarise(records, 2.0)
        assert (summary["requests"], summary["errors"], summary["prompt_tokens"]) == (5, 2, 27)

    def test_equal_ids_in_a_trace_do_not_share_a_session(self, ensemble: Any) -> None:
        with Client(ensemble.address) as client:
            replay(client, [session("same", "a"), session("same", "b")], ReplayOptions(sessions=2))
        assert len({s.session_id for s in ensemble.seen}) == 2

    @pytest.mark.parametrize("name", ["short", "x" * 500, "é" * 70, "agent-7/α"])
    def test_server_ids_fit_and_differ(self, name: str) -> None:
        ids = {server_session_id("0011aabb", n, name) for n in (0, 1, 99999)}
        assert len(ids) == 3
        assert all(len(i.encode()) <= 128 for i in ids)

    def test_a_broken_trace_is_raised_in_the_caller(self, ensemble: Any) -> None:
        def broken() -> Any:
            yield SESSIONS[0]
            raise TraceError("line 2 is broken")

        with Client(ensemble.address) as client, pytest.raises(TraceError, match="line 2"):
            replay(client, broken(), ReplayOptions(sessions=3))

    @pytest.mark.server
    def test_a_real_server_finds_shifted_rows(self, server: Any) -> None:
        sessions = list(apply_scenario("early", synthetic_sessions(4, turns=3, seed=1)))
        with Client(server.grpc_url) as client:
            records = replay(client, sessions, ReplayOptions(sessions=4, max_tokens=2, cache_salt="replay"))
        summary = summarise(records, 1.0)
        assert (summary["requests"], summary["errors"]) == (12, 0)
        assert summary["shares"]["shifted"] > 0.5


class TestSummary:
    def test_shares_and_quantiles(self) -> None:
        rng = np.random.default_rng(4)
        records, gaps, ttfts = [], [], []
        for turn in range(37):
            times = tuple(rng.exponential(5, rng.integers(0, 9)).tolist())
            ttft = float(rng.exponential(50))
            records.append(TurnRecord("s", turn, 100, 20, 50, 30, len(times), 2, ttft, times))
            gaps += times
            ttfts.append(ttft)
        summary = summarise(records, 1.0)
        assert summary["shares"] == {"exact": 0.2, "shifted": 0.5, "computed": 0.3}
        for name, values in (("ttft_ms", ttfts), ("inter_token_ms", gaps)):
            ordered = sorted(values)
            assert summary[name]["median"] == pytest.approx(np.median(values))
            below = sum(v <= summary[name]["p95"] for v in ordered) / len(ordered)
            assert 0.93 <= below <= 0.97

    def test_nothing_measured(self) -> None:
        summary = summarise([TurnRecord("s", 0, error="x")], 0.0)
        assert summary["shares"] == {"exact": None, "shifted": None, "computed": None}
        assert summary["ttft_ms"] == {"median": None, "p95": None}


class TestReplayCommand:
    def test_report_and_json(self, ensemble: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trace, out = write(tmp_path / "t.jsonl", SESSIONS), tmp_path / "out.json"
        code = main(
            ["replay", trace, "--url", ensemble.address, "--sessions", "2", "--json", str(out), "--reuse", "exact"]
        )
        assert code == 0
        shown = capsys.readouterr().out
        assert "0 errors" in shown
        assert "33.3%" in shown
        result = json.loads(out.read_text())
        assert len(result["requests"]) == result["summary"]["requests"] == 13
        keys = {"session", "turn", "prompt_tokens", "exact_tokens", "shifted_tokens", "computed_tokens", "segments"}
        assert result["requests"][0].keys() >= keys | {"ttft_ms", "text", "error"}
        assert result["summary"]["reuse"] == "exact"
        assert all(s.inputs["reuse"][2][4:] == b"exact" for s in ensemble.seen)

    def test_limits(self, ensemble: Any, tmp_path: Path) -> None:
        trace, out = write(tmp_path / "t.jsonl", SESSIONS), tmp_path / "out.json"
        options = ["--url", ensemble.address, "--json", str(out), "--limit-sessions", "3", "--turns", "2"]
        assert main(["replay", trace, *options]) == 0
        sent = [(r["session"], r["turn"]) for r in json.loads(out.read_text())["requests"]]
        assert sent == [("s0", 0), ("s1", 0), ("s1", 1), ("s2", 0), ("s2", 1)]

    def test_scenario_changes_what_is_sent(self, ensemble: Any, tmp_path: Path) -> None:
        trace = write(tmp_path / "t.jsonl", SESSIONS)
        assert main(["replay", trace, "--scenario", "early", "--url", ensemble.address]) == 0
        assert all(s.prompt().startswith("x-agent-meta: request_id=") for s in ensemble.seen)

    def test_errors_give_exit_code_1(self, ensemble: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        trace = write(tmp_path / "t.jsonl", [session("a", "invalid", "fine")])
        assert main(["replay", trace, "--url", ensemble.address]) == 1
        assert "max_tokens is 0" in " ".join(capsys.readouterr().out.split())

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [(["none.jsonl"], "none.jsonl cannot be read"), (["none.jsonl", "--url", "127.0.0.1:1"], "irminsul serve")],
    )
    def test_one_clear_line(
        self, ensemble: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
    ) -> None:
        assert main(["replay", "--url", ensemble.address, *arguments]) == 1
        captured = capsys.readouterr()
        assert message in captured.err
        assert len(captured.err.splitlines()) == 1

    def test_zero_sessions_are_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["replay", "t.jsonl", "--sessions", "0"])
        assert "'0' is not a whole number of at least 1" in capsys.readouterr().err
