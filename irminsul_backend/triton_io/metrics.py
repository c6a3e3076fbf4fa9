"""Fills in the table of metrics, in each stub process on a thread of its own: a change is a round trip to the server.

Twice a second it takes what has been noted meanwhile. Nothing here runs on the engine's thread.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

import triton_python_backend_utils as pb_utils

from irminsul_backend.errors import InvalidRequestError, OverloadedError, SessionError
from irminsul_backend.protocol import Event
from irminsul_backend.triton_io.engine_interface import EngineInterface
from irminsul_backend.triton_io.metric_table import CHUNKER_METRICS, ENGINE_METRICS, OUTCOMES, SOURCES, MetricSpec

if TYPE_CHECKING:
    from irminsul_backend.frontend.sessions import SessionTable

EVERY_S = 0.5
"""Seconds between two publications."""
TOTALS = {
    "steps": ("irminsul_engine_steps_total", ""),
    "preemptions": ("irminsul_preemptions_total", ""),
    "distrusted": ("irminsul_distrusted_total", ""),
    "cache_resets": ("irminsul_cache_resets_total", ""),
    "faults": ("irminsul_faults_total", ""),
    "finished_cancelled": ("irminsul_cancellations_total", "client"),
    "timeouts": ("irminsul_cancellations_total", "timeout"),
    "undeliverable": ("irminsul_cancellations_total", "undeliverable"),
}
"""Metric and label of each of the engine's own counters; `rejected_<cause>` has its cause as label."""

logger = logging.getLogger(__name__)


class Families:
    """The metrics of one process. Of counters and gauges only changes are sent to the server, by :meth:`flush`."""

    def __init__(self, table: Iterable[MetricSpec]) -> None:
        kinds = {
            "counter": pb_utils.MetricFamily.COUNTER,
            "gauge": pb_utils.MetricFamily.GAUGE,
            "histogram": pb_utils.MetricFamily.HISTOGRAM,
        }
        self._specs = {spec.name: spec for spec in table}
        self._families = {
            spec.name: pb_utils.MetricFamily(name=spec.name, description=spec.doc, kind=kinds[spec.kind])
            for spec in self._specs.values()
        }
        self._metrics: dict[tuple[str, str], pb_utils.Metric] = {}
        self._increments: Counter[tuple[str, str]] = Counter()
        self._totals: dict[tuple[str, str], float] = {}
        self._values: dict[tuple[str, str], float] = {}
        for spec in self._specs.values():
            for value in spec.values:
                self._metric(spec.name, value)

    def add(self, name: str, amount: float, value: str = "") -> None:
        """Increment a counter. value: of its label."""
        self._increments[name, value] += amount  # type: ignore[assignment]

    def add_up_to(self, name: str, total: float, value: str = "") -> None:
        """Increment a counter by what somebody else's `total` has grown; a lower total has begun at 0 again."""
        last = self._totals.get((name, value), 0)
        self._totals[name, value] = total
        self.add(name, total - last if total >= last else total, value)

    def set(self, name: str, number: float, value: str = "") -> None:
        """Set a gauge."""
        if self._values.get((name, value), 0.0) != number:
            self._metric(name, value).set(number)
            self._values[name, value] = number

    def observe(self, name: str, number: float) -> None:
        """Put a number into a histogram."""
        self._metric(name).observe(number)

    def flush(self) -> None:
        """Send the increments of counters."""
        for (name, value), amount in self._increments.items():
            if amount:
                self._metric(name, value).increment(amount)
        self._increments.clear()

    def clear(self) -> None:
        """Give the metrics back. Their destructor would otherwise run after the stub's own end, and crash there."""
        self._metrics.clear()
        self._families.clear()

    def _metric(self, name: str, value: str = "") -> pb_utils.Metric:
        if (name, value) not in self._metrics:
            spec = self._specs[name]
            labels = {spec.label: value} if spec.label else {}
            family = self._families[name]
            self._metrics[name, value] = (
                family.Metric(labels=labels, buckets=list(spec.buckets))
                if spec.buckets
                else family.Metric(labels=labels)
            )
        return self._metrics[name, value]


class Publisher:
    """A thread that fills in one process's metrics. Subclasses say what with, in `_publish`."""

    def __init__(self, table: Iterable[MetricSpec]) -> None:
        self._families = Families(table)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="irminsul-metrics", daemon=True)
        self._publish()
        self._thread.start()

    def close(self) -> None:
        """Publish for the last time and end the thread."""
        self._closing.set()
        self._thread.join(timeout=2)
        if not self._thread.is_alive():
            self._families.clear()

    def _publish(self) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        closing = False
        while not closing:
            closing = self._closing.wait(EVERY_S)
            try:
                self._publish()
                self._families.flush()
            except Exception:
                logger.exception("metrics were not published")


class EngineMetrics(Publisher):
    """Counts every request that ended, times its tokens, and publishes the engine's snapshots."""

    def __init__(self, engine: EngineInterface) -> None:
        self._engine = engine
        self._events: queue.SimpleQueue[tuple[float, Event]] = queue.SimpleQueue()
        self._last_tokens: dict[str, float] = {}
        """When the last tokens of each running request were sent."""
        super().__init__(ENGINE_METRICS)

    def count(self, event: Event) -> None:
        """Take note of an event that is being sent. Returns at once."""
        if event.token_ids or event.kind in ("finished", "error"):
            self._events.put((time.monotonic(), event))

    def _publish(self) -> None:
        while not self._events.empty():
            self._take(*self._events.get())
        snapshot = self._engine.snapshot()
        self._families.set("irminsul_requests_waiting", snapshot.waiting)
        self._families.set("irminsul_requests_running", snapshot.running)
        self._families.set("irminsul_cache_donors", snapshot.cache.get("idle", 0))
        for state in ("used", "capacity"):
            self._families.set("irminsul_cache_slots", snapshot.cache.get(state, 0), state)
        self._families.add_up_to("irminsul_evictions_total", snapshot.cache.get("evictions", 0))
        for name, total in snapshot.counters.items():
            if name in TOTALS:
                self._families.add_up_to(TOTALS[name][0], total, TOTALS[name][1])
            elif name.startswith("rejected_"):
                cause = name.removeprefix("rejected_")
                self._families.add_up_to("irminsul_engine_rejections_total", total, cause)

    def _take(self, at: float, event: Event) -> None:
        if event.token_ids:
            self._families.add("irminsul_generated_tokens_total", len(event.token_ids))
            before = self._last_tokens.get(event.key)
            self._last_tokens[event.key] = at
            if before is not None:
                self._families.observe("irminsul_inter_token_seconds", (at - before) / len(event.token_ids))
        if event.kind not in ("finished", "error"):
            return
        self._last_tokens.pop(event.key, None)
        outcome = event.finish_reason if event.finish_reason in OUTCOMES else "stop"
        self._families.add("irminsul_requests_total", 1, "error" if event.kind == "error" else outcome)
        usage = event.usage
        if usage is None:
            return
        for source in SOURCES:
            self._families.add("irminsul_prompt_tokens_total", getattr(usage, f"{source}_tokens"), source)
        self._families.observe("irminsul_prompt_segments", usage.segments)
        if usage.ttft_ms:  # else it ended before its first token
            self._families.observe("irminsul_time_to_first_token_seconds", usage.ttft_ms / 1000)
            self._families.observe("irminsul_queue_seconds", usage.queue_ms / 1000)
            self._families.observe("irminsul_prefill_seconds", usage.prefill_ms / 1000)


class ChunkerMetrics(Publisher):
    """Counts what is refused before the engine, and the open sessions."""

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions
        self._refused: queue.SimpleQueue[str] = queue.SimpleQueue()
        super().__init__(CHUNKER_METRICS)

    def count(self, error: Exception) -> None:
        """Count a refused request. Returns at once."""
        kinds = {SessionError: "session", InvalidRequestError: "invalid", OverloadedError: "overloaded"}
        self._refused.put(next((cause for kind, cause in kinds.items() if isinstance(error, kind)), "internal"))

    def _publish(self) -> None:
        while not self._refused.empty():
            self._families.add("irminsul_rejections_total", 1, self._refused.get())
        self._families.set("irminsul_sessions", len(self._sessions))
