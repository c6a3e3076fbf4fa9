"""The table of metrics on Triton's metrics port. None holds a prompt, an output, a request key, a session or a salt.

docs/metrics.md is made from it by `make generate`; :mod:`irminsul_backend.triton_io.metrics` fills it in;
`irminsul top` reads it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_LATENCY_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_COUNTS = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)


@dataclass(frozen=True)
class MetricSpec:
    """One metric family. Durations are in seconds."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    doc: str
    label: str = ""
    values: tuple[str, ...] = ("",)
    """What the label may be: ("",) where there is none. All are there from the start, so that rates see the first."""
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, +Inf excepted."""


SOURCES = ("exact", "shifted", "computed")
OUTCOMES = ("stop", "length", "cancelled", "error")
ENGINE_METRICS = (
    MetricSpec("irminsul_requests_total", "counter", "Ended requests by outcome", "outcome", OUTCOMES),
    MetricSpec(
        "irminsul_prompt_tokens_total", "counter", "Prompt tokens of finished requests by source", "source", SOURCES
    ),
    MetricSpec("irminsul_generated_tokens_total", "counter", "Tokens generated, of running requests too"),
    MetricSpec(
        "irminsul_time_to_first_token_seconds",
        "histogram",
        "Time from a request's arrival in the engine to its first token",
        buckets=_LATENCY_S,
    ),
    MetricSpec(
        "irminsul_inter_token_seconds",
        "histogram",
        "Time between two responses of one request per token in the later one; one observation a response",
        buckets=_LATENCY_S,
    ),
    MetricSpec(
        "irminsul_queue_seconds",
        "histogram",
        "Time from a request's arrival in the engine to the start of its prefill",
        buckets=_LATENCY_S,
    ),
    MetricSpec("irminsul_prefill_seconds", "histogram", "Time from then to its first token", buckets=_LATENCY_S),
    MetricSpec(
        "irminsul_prompt_segments",
        "histogram",
        "Segments that the cache was found to hold of a prompt",
        buckets=_COUNTS,
    ),
    MetricSpec("irminsul_requests_waiting", "gauge", "Requests in the engine's queue"),
    MetricSpec("irminsul_requests_running", "gauge", "Requests that are being prefilled or decoded"),
    MetricSpec(
        "irminsul_cache_slots",
        "gauge",
        "Slots of the KV pool (one holds one token's rows) by state; used ones of ended requests give way when needed",
        "state",
        ("used", "capacity"),
    ),
    MetricSpec("irminsul_cache_donors", "gauge", "Ended sequences that the cache keeps for reuse"),
    MetricSpec("irminsul_evictions_total", "counter", "Donors that gave way to new sequences"),
    MetricSpec("irminsul_preemptions_total", "counter", "Requests that gave way to others and were resumed"),
    MetricSpec(
        "irminsul_engine_rejections_total",
        "counter",
        "Requests that the engine did not take, by cause",
        "cause",
        ("queue_full", "namespace_full", "key_in_use", "unavailable", "invalid"),
    ),
    MetricSpec(
        "irminsul_cancellations_total",
        "counter",
        "Requests that ended early, by cause: client (cancelled or disconnected), timeout (its timeout_ms passed), "
        "undeliverable (a response could not be handed over)",
        "cause",
        ("client", "timeout", "undeliverable"),
    ),
    MetricSpec(
        "irminsul_distrusted_total", "counter", "Prompts computed again because reused rows gave non-finite logits"
    ),
    MetricSpec("irminsul_cache_resets_total", "counter", "Times that the cache was emptied after a fault"),
    MetricSpec(
        "irminsul_faults_total", "counter", "Exceptions inside the engine, each of which ended a request or a step"
    ),
    MetricSpec("irminsul_engine_steps_total", "counter", "Forward passes"),
)
CHUNKER_METRICS = (
    MetricSpec(
        "irminsul_rejections_total",
        "counter",
        "Requests refused before the engine, by cause: invalid, session (unknown, expired, already open), overloaded "
        "(too many bytes wait to be tokenised), internal (a defect; see the log)",
        "cause",
        ("invalid", "session", "overloaded", "internal"),
    ),
    MetricSpec("irminsul_sessions", "gauge", "Open sessions"),
)
METRICS = (*ENGINE_METRICS, *CHUNKER_METRICS)
