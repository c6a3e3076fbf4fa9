"""Reads a server's metrics port and works out rates and quantiles between two readings."""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from irminsul_backend.errors import IrminsulError
from irminsul_backend.triton_io.metric_table import METRICS, OUTCOMES, SOURCES, MetricSpec

TIMEOUT_S = 5.0
MAX_BYTES = 1 << 24
"""Largest answer that is read."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)(?: -?\d+)?$")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)",?')
_REJECTIONS = ("irminsul_rejections_total", "irminsul_engine_rejections_total")
SPECS = {spec.name: spec for spec in METRICS}

Samples = Mapping[tuple[str, str], float]
"""Value of each of our series, by its name and its own label: `le` of a bucket."""


class ScrapeError(IrminsulError):
    """The metrics port does not answer, or not with Irminsul's metrics."""


@dataclass(frozen=True)
class Scrape:
    """The metrics at one moment."""

    at: float = 0.0
    """Seconds on the monotonic clock."""
    samples: Samples = field(default_factory=dict)


def read_metrics(url: str) -> Scrape:
    """Read a metrics page. Raises ScrapeError with the address and the reason."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as page:
            text = page.read(MAX_BYTES).decode(errors="replace")
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        raise ScrapeError(f"{url} does not answer: {reason}; name the metrics port with --metrics-url") from None
    samples = parse(text)
    if not samples:
        raise ScrapeError(f"{url} has no irminsul metrics; it must be the metrics port of an Irminsul server")
    return Scrape(time.monotonic(), samples)


def parse(text: str) -> dict[tuple[str, str], float]:
    """Our series of a page in Prometheus' text format; all else is passed over."""
    samples: dict[tuple[str, str], float] = {}
    for line in text.splitlines():
        found = _SAMPLE.match(line)
        if found is None or not found[1].startswith("irminsul_"):
            continue
        labels = dict(_LABEL.findall(found[2] or ""))
        samples[found[1], next(iter(labels.values()), "")] = float(found[3])
    return samples


def summarise(before: Scrape, after: Scrape) -> dict[str, Any]:
    """What happened between two readings, and how things stood at the second, as JSON values.

    Durations are in milliseconds, None where nothing was observed. A counter that went down has begun anew.
    """
    seconds = max(after.at - before.at, 1e-9)

    def grown(name: str, value: str = "") -> float:
        now, then = after.samples.get((name, value), 0.0), before.samples.get((name, value), 0.0)
        return now - then if now >= then else now

    def rates(name: str, values: Iterable[str]) -> dict[str, float]:
        return {value: round(grown(name, value) / seconds, 3) for value in values}

    def counts(name: str) -> dict[str, int]:
        return {value: int(grown(name, value)) for value in SPECS[name].values}

    def milliseconds(name: str) -> dict[str, float | None]:
        buckets = [(bound, grown(f"{name}_bucket", label)) for bound, label in _bounds(SPECS[name], after.samples)]
        return {
            f"p{share:.0%}".rstrip("%"): None if (q := quantile(share, buckets)) is None else round(1000 * q, 3)
            for share in (0.5, 0.95)
        }

    def gauge(name: str, value: str = "") -> int:
        return int(after.samples.get((name, value), 0))

    prompts = grown("irminsul_prompt_segments_count")
    return {
        "seconds": round(seconds, 3),
        "requests_per_s": rates("irminsul_requests_total", OUTCOMES),
        "tokens_per_s": rates("irminsul_prompt_tokens_total", SOURCES)
        | {"generated": round(grown("irminsul_generated_tokens_total") / seconds, 3)},
        "steps_per_s": round(grown("irminsul_engine_steps_total") / seconds, 3),
        "ttft_ms": milliseconds("irminsul_time_to_first_token_seconds"),
        "inter_token_ms": milliseconds("irminsul_inter_token_seconds"),
        "queue_ms": milliseconds("irminsul_queue_seconds"),
        "prefill_ms": milliseconds("irminsul_prefill_seconds"),
        "segments_per_prompt": round(grown("irminsul_prompt_segments_sum") / prompts, 2) if prompts else None,
        "waiting": gauge("irminsul_requests_waiting"),
        "running": gauge("irminsul_requests_running"),
        "sessions": gauge("irminsul_sessions"),
        "cache": {state: gauge("irminsul_cache_slots", state) for state in SPECS["irminsul_cache_slots"].values},
        "donors": gauge("irminsul_cache_donors"),
        "evictions": int(grown("irminsul_evictions_total")),
        "preemptions": int(grown("irminsul_preemptions_total")),
        "rejections": counts("irminsul_rejections_total")
        | counts("irminsul_engine_rejections_total")
        | {"invalid": int(sum(grown(n, "invalid") for n in _REJECTIONS))},
        "cancellations": counts("irminsul_cancellations_total"),
        "distrusted": int(grown("irminsul_distrusted_total")),
        "cache_resets": int(grown("irminsul_cache_resets_total")),
        "faults": int(grown("irminsul_faults_total")),
    }


def _bounds(spec: MetricSpec, samples: Samples) -> list[tuple[float, str]]:
    """Upper bound and label of each bucket, ascending; labels as the server writes them."""
    labels = [label for name, label in samples if name == f"{spec.name}_bucket"]
    return sorted((math.inf if label == "+Inf" else float(label), label) for label in labels)


def quantile(share: float, buckets: list[tuple[float, float]]) -> float | None:
    """As PromQL's histogram_quantile: linear within a bucket; the last finite bound if it lies above that.

    Args:
        buckets: (upper bound, number of observations up to it), ascending, the last bound infinite.
    """
    if not buckets or buckets[-1][1] <= 0:
        return None
    rank, low, below = share * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank and count > below:
            return low if math.isinf(bound) else low + (bound - low) * (rank - below) / (count - below)
        low, below = bound, count
    return low
