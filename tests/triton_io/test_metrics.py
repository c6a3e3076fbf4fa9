"""What a scrape shows: the table of metrics, filled in from events, refusals and the engine's snapshots."""

from __future__ import annotations

import re
import weakref
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from fake_engine import USAGE, FakeEngine, finished, tokens

from irminsul_backend.engine.core import COUNTERS
from irminsul_backend.errors import InvalidRequestError, OverloadedError, SessionError
from irminsul_backend.frontend.sessions import SessionTable
from irminsul_backend.protocol import EngineSnapshot, Event
from irminsul_backend.triton_io.metric_table import ENGINE_METRICS, METRICS


class TestTable:
    def test_names_follow_prometheus_conventions(self) -> None:
        assert len({spec.name for spec in METRICS}) == len(METRICS)
        for spec in METRICS:
            assert re.fullmatch(r"irminsul_[a-z_]+", spec.name)
            assert spec.name.endswith("_total") == (spec.kind == "counter")
            assert bool(spec.buckets) == (spec.kind == "histogram")
            assert list(spec.buckets) == sorted(set(spec.buckets))
            assert bool(spec.label) == (spec.values != ("",))
            assert "second" not in spec.name or spec.name.endswith("_seconds")

    def test_no_label_takes_what_clients_choose(self) -> None:
        assert {spec.label for spec in METRICS} == {"", "outcome", "source", "state", "cause"}

    def test_every_counter_of_the_engine_has_its_place(self, border: Any) -> None:
        causes = next(spec.values for spec in ENGINE_METRICS if spec.name == "irminsul_engine_rejections_total")
        rejections = {name.removeprefix("rejected_") for name in COUNTERS if name.startswith("rejected_")}
        assert rejections == set(causes)
        assert border("metrics").TOTALS.keys() <= set(COUNTERS)


class TestEngine:
    @pytest.fixture
    def engine(self) -> FakeEngine:
        return FakeEngine()

    @pytest.fixture
    def metrics(self, engine: FakeEngine, border: Any) -> Any:
        return border("metrics").EngineMetrics(engine)

    def test_all_are_there_from_the_start(self, metrics: Any, backend_utils: ModuleType) -> None:
        metrics.close()
        values = {name: metric.value for name, metric in backend_utils.metrics.items()}
        assert values.pop('irminsul_cache_slots{state="capacity"}') == 64
        assert set(values.values()) == {0.0}
        assert len(values) + 1 == sum(len(spec.values) for spec in ENGINE_METRICS)

    def test_ended_requests(self, metrics: Any, backend_utils: ModuleType) -> None:
        metrics.count(tokens(1, 2, 3))
        usage = replace(USAGE, ttft_ms=2000, queue_ms=500, prefill_ms=1500)
        events = (replace(finished(), usage=usage), Event("b", 0, "error", error="x"), Event("c", 0, "finished"))
        for event in events:
            metrics.count(event)
        metrics.close()
        values = {name: metric.value for name, metric in backend_utils.metrics.items() if metric.value}
        assert values == {
            'irminsul_prompt_tokens_total{source="exact"}': 1,
            'irminsul_prompt_tokens_total{source="shifted"}': 2,
            'irminsul_prompt_tokens_total{source="computed"}': 6,
            "irminsul_generated_tokens_total": 3,
            'irminsul_requests_total{outcome="length"}': 1,
            'irminsul_requests_total{outcome="error"}': 1,
            'irminsul_requests_total{outcome="stop"}': 1,
            'irminsul_cache_slots{state="capacity"}': 64,
        }
        observations = {name: m.observations for name, m in backend_utils.metrics.items() if m.observations}
        assert observations == {
            "irminsul_time_to_first_token_seconds": [2.0],
            "irminsul_queue_seconds": [0.5],
            "irminsul_prefill_seconds": [1.5],
            "irminsul_prompt_segments": [1],
        }

    def test_a_request_that_ended_before_its_first_token_is_not_timed(
        self, metrics: Any, backend_utils: ModuleType
    ) -> None:
        metrics.count(replace(finished(), usage=replace(USAGE, ttft_ms=0.0, completion_tokens=0)))
        metrics.close()
        assert backend_utils.metrics["irminsul_time_to_first_token_seconds"].observations == []

    def test_time_between_tokens(
        self, metrics: Any, backend_utils: ModuleType, border: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        now = iter([1.0, 1.5, 5.0, 6.0, 7.0, 9.0])
        monkeypatch.setattr(border("metrics"), "time", SimpleNamespace(monotonic=lambda: next(now)))
        script = [tokens(1), tokens(2, key="b"), tokens(3, 4), Event("b", 0, "error"), tokens(5, key="b"), finished()]
        for event in (Event("a", 0, "admitted"), *script, Event("a", 0, "progress")):
            metrics.count(event)
        metrics.close()
        observations = backend_utils.metrics["irminsul_inter_token_seconds"].observations
        assert observations == [(5.0 - 1.0) / 2], "an ended request's key may be used again"

    def test_snapshots(self, engine: FakeEngine, metrics: Any, backend_utils: ModuleType) -> None:
        engine.state = EngineSnapshot(
            waiting=3,
            running=2,
            cache={"used": 7, "idle_tokens": 5, "idle": 1, "capacity": 64, "evictions": 9},
            counters={"preemptions": 4, "rejected_queue_full": 6, "timeouts": 2, "cache_resets": 1, "unknown": 5},
        )
        metrics._publish()
        engine.state = replace(engine.state, cache={**engine.state.cache, "evictions": 2})  # a new cache counts anew
        metrics.close()
        values = {name: metric.value for name, metric in backend_utils.metrics.items() if metric.value}
        assert values == {
            "irminsul_requests_waiting": 3,
            "irminsul_requests_running": 2,
            'irminsul_cache_slots{state="used"}': 7,
            'irminsul_cache_slots{state="capacity"}': 64,
            "irminsul_cache_donors": 1,
            "irminsul_evictions_total": 9 + 2,
            "irminsul_preemptions_total": 4,
            'irminsul_engine_rejections_total{cause="queue_full"}': 6,
            'irminsul_cancellations_total{cause="timeout"}': 2,
            "irminsul_cache_resets_total": 1,
        }

    def test_a_failing_engine_does_not_end_the_thread(
        self, engine: FakeEngine, metrics: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine.state = None  # type: ignore[assignment]
        metrics.close()
        assert "metrics were not published" in caplog.text

    def test_they_are_given_back_while_the_stub_lives(self, metrics: Any, backend_utils: ModuleType) -> None:
        family = weakref.ref(metrics._families._families["irminsul_requests_total"])
        assert family() is not None
        metrics.close()
        assert family() is None


def test_the_chunkers_refusals_and_sessions(border: Any, backend_utils: ModuleType) -> None:
    sessions = SessionTable(600)
    metrics = border("metrics").ChunkerMetrics(sessions)
    sessions.enter("a", True, False)
    for error in (InvalidRequestError(""), SessionError(""), OverloadedError(""), KeyError(""), SessionError("")):
        metrics.count(error)
    metrics.close()
    assert {name: metric.value for name, metric in backend_utils.metrics.items()} == {
        "irminsul_sessions": 1,
        'irminsul_rejections_total{cause="invalid"}': 1,
        'irminsul_rejections_total{cause="session"}': 2,
        'irminsul_rejections_total{cause="overloaded"}': 1,
        'irminsul_rejections_total{cause="internal"}': 1,
    }
