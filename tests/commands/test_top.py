"""`irminsul top`: rates and quantiles between two readings of a metrics page, and what is shown of them."""

from __future__ import annotations

import io
import json
import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from rich.console import Console

from irminsul_backend.commands import top
from irminsul_backend.commands.main import main
from irminsul_backend.commands.scrape import Scrape, parse, quantile, summarise

PAGE = """# HELP irminsul_requests_total Ended requests
# TYPE irminsul_requests_total counter
nv_inference_count{model="irminsul",version="1"} 9
irminsul_requests_total{outcome="stop"} %(stop)d
irminsul_prompt_tokens_total{source="shifted"} 3e+02
irminsul_generated_tokens_total 20
irminsul_requests_waiting 2
irminsul_cache_slots{state="used"} 25
irminsul_cache_slots{state="capacity"} 100
irminsul_rejections_total{cause="invalid"} 1
irminsul_engine_rejections_total{cause="invalid"} 2
irminsul_time_to_first_token_seconds_bucket{le="0.1"} 0
irminsul_time_to_first_token_seconds_bucket{le="+Inf"} 4
irminsul_time_to_first_token_seconds_bucket{le="0.5"} 4
"""


def scrape(at: float, stop: int = 10) -> Scrape:
    return Scrape(at, parse(PAGE % {"stop": stop}))


class TestSummary:
    def test_only_our_series_are_read(self) -> None:
        samples = parse(PAGE % {"stop": 10})
        assert len(samples) == 11
        assert samples["irminsul_requests_total", "stop"] == 10
        assert samples["irminsul_prompt_tokens_total", "shifted"] == 300

    def test_rates_and_states(self) -> None:
        now = summarise(scrape(100.0, stop=10), scrape(104.0, stop=30))
        assert now["requests_per_s"] == {"stop": 5.0, "length": 0.0, "cancelled": 0.0, "error": 0.0}
        assert now["tokens_per_s"]["generated"] == 0.0
        assert (now["waiting"], now["cache"]["used"], now["cache"]["capacity"]) == (2, 25, 100)
        assert now["ttft_ms"] == {"p50": None, "p95": None}, "nothing was observed meanwhile"

    def test_since_the_start(self) -> None:
        total = summarise(Scrape(), scrape(10.0))
        assert total["ttft_ms"] == {"p50": 300.0, "p95": 480.0}
        assert total["rejections"]["invalid"] == 1 + 2

    def test_a_server_that_was_started_anew_counts_from_zero(self) -> None:
        assert summarise(scrape(0.0, stop=1000), scrape(2.0, stop=10))["requests_per_s"]["stop"] == 5.0

    @pytest.mark.parametrize(
        ("share", "buckets", "expected"),
        [
            (0.5, [], None),
            (0.5, [(1.0, 0.0), (math.inf, 0.0)], None),
            (0.5, [(1.0, 4.0), (math.inf, 4.0)], 0.5),
            (0.5, [(1.0, 1.0), (2.0, 1.0), (3.0, 4.0), (math.inf, 4.0)], 2 + 1 / 3),
            (0.95, [(1.0, 1.0), (2.0, 1.0), (math.inf, 2.0)], 2.0),
            (0.5, [(1.0, 0.0), (math.inf, 4.0)], 1.0),
        ],
    )
    def test_quantiles(self, share: float, buckets: list[tuple[float, float]], expected: float | None) -> None:
        found = quantile(share, buckets)
        assert found == expected if expected is None else found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("server", "url"),
    [
        ("", "http://localhost:8002/metrics"),
        ("gpu1", "http://gpu1:8002/metrics"),
        ("gpu1:8001", "http://gpu1:8002/metrics"),
        ("http://gpu1:8000/v2", "http://gpu1:8002/metrics"),
        ("[::1]:8001", "http://[::1]:8002/metrics"),
    ],
)
def test_where_a_server_keeps_its_metrics(server: str, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("IRMINSUL_METRICS_PORT", raising=False)
    assert top.metrics_url(server) == url


class TestCommand:
    @pytest.fixture
    def serve(self) -> Iterator[Callable[..., str]]:
        """Serve pages one after the other, the last one for ever; returns the address."""
        servers = []

        def start(*pages: str) -> str:
            left = deque(pages)

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    page = left.popleft() if len(left) > 1 else left[0]
                    self.send_response(200 if page else 500)
                    self.end_headers()
                    self.wfile.write(page.encode())

                def log_message(self, *args: Any) -> None:
                    pass

            servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
            return f"http://127.0.0.1:{servers[-1].server_port}/metrics"

        yield start
        for server in servers:
            server.shutdown()
            server.server_close()

    def test_once_for_a_script(self, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
        url = serve(PAGE % {"stop": 10}, PAGE % {"stop": 12})
        assert main(["top", "--once", "--json", "--interval", "0.1", "--metrics-url", url]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["interval"]["requests_per_s"]["stop"] > 0
        assert answer["since_start"]["ttft_ms"]["p50"] == 300.0
        assert "requests_per_s" not in answer["since_start"]

    def test_once_for_people(self, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
        url = serve(PAGE % {"stop": 10})
        assert main(["top", "--once", "--interval", "0.1", "--metrics-url", url]) == 0
        shown = capsys.readouterr().out
        assert all(word in shown for word in ("requests/s", "tokens/s", "first token", "25%", "3 invalid"))

    def test_no_server(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["top", "--once", "--metrics-url", "http://127.0.0.1:1/metrics"]) == 1
        assert "http://127.0.0.1:1/metrics does not answer: " in capsys.readouterr().err

    def test_another_server(self, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["top", "--metrics-url", serve("up 1\n")]) == 1
        assert "has no irminsul metrics" in capsys.readouterr().err

    def test_a_server_that_goes_away_and_comes_back(self, serve: Any) -> None:
        page = PAGE % {"stop": 1}
        url = serve(page, page, "", page, page)
        history = deque([top.read_metrics(url)])
        readings = top.readings(url, history, 0.001)
        assert next(readings) == ""
        assert "does not answer: Internal Server Error" in next(readings)
        assert next(readings) == "", "it goes on, from nothing, once there are two readings"
        assert len(history) == 2

    def test_the_quantiles_cover_a_minute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        times = iter(range(10, 1000, 10))
        monkeypatch.setattr(top, "read_metrics", lambda url: scrape(float(next(times))))
        history = deque([scrape(0.0)])
        readings = top.readings("", history, 0.0)
        for _ in range(20):
            next(readings)
        assert history[-1].at - history[0].at == top.QUANTILE_SECONDS

    def test_a_view_fits_a_narrow_terminal(self) -> None:
        console = Console(width=80, record=True, file=io.StringIO())
        console.print(top.view("http://localhost:8002/metrics", deque([scrape(0.0), scrape(2.0)])))
        assert all(len(line) <= 80 for line in console.export_text().splitlines())

    @pytest.mark.parametrize("interval", ["0", "nan", "1e9", "x"])
    def test_an_interval_that_is_none(self, interval: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["top", "--interval", interval])
        assert "--interval" in capsys.readouterr().err
