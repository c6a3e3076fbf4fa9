"""A well-behaved stream beside whatever a check does: it must not notice."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from types import TracebackType
from typing import Any

from irminsul_client import Client, IrminsulClientError

from irminsul_backend.benchmarks.soak.harness import Row, milliseconds

REQUEST: dict[str, Any] = {
    "text": "A neighbour asks about the order, the invoice and the parcel, and reads the answer as it comes.",
    "max_tokens": 120,
    "ignore_eos": True,
    "reuse": "exact",
    "cache_salt": "neighbour",
}
QUIET_RUNS = 3
MOST_SECONDS = 60.0


class Neighbour:
    """Streams one request again and again, for the length of a `with`, after a few quiet runs."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answers = 0
        self.wrong: list[str] = []
        """Answers that failed, or differ from the quiet run's."""
        self.worst_gap = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        with Client(url) as client:
            runs = [self._one(client) for _ in range(QUIET_RUNS)]
        self._expected = runs[0][0]
        self.quiet_gap = statistics.median(gap for _, gap in runs[1:])

    def _one(self, client: Client) -> tuple[tuple[int, ...], float]:
        """The answer's ids, and the longest wait for one of its responses."""
        ids: list[int] = []
        worst, last = 0.0, time.monotonic()
        for chunk in client.stream(timeout=MOST_SECONDS, **REQUEST):
            now = time.monotonic()
            worst, last = max(worst, now - last), now
            ids += chunk.token_ids
        return tuple(ids), worst

    def _run(self) -> None:
        while not self._stop.is_set():
            with Client(self._url) as client:
                try:
                    ids, gap = self._one(client)
                except IrminsulClientError as error:
                    self.wrong.append(f"{type(error).__name__}: {error}"[:120])
                    self._stop.wait(0.5)
                    continue
            self.answers += 1
            self.worst_gap = max(self.worst_gap, gap)
            if ids != self._expected:
                self.wrong.append("another answer than in the quiet run")

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join(timeout=MOST_SECONDS + 5)

    def rows(self) -> Iterator[Row]:
        """What it saw."""
        total = self.answers + len([w for w in self.wrong if not w.startswith("another")])
        measured = f"{total - len(self.wrong)} of {total} equal; worst gap {milliseconds(self.worst_gap)}"
        measured += f" (quiet {milliseconds(self.quiet_gap)})"
        if self.wrong:
            measured += f"; first: {self.wrong[0]}"
        yield Row(
            "a normal stream beside it",
            "every answer equals the quiet run's",
            measured,
            self.answers > 0 and not self.wrong,
        )
