"""How a case reaches a server, and what counts as a clear refusal."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from irminsul_client import Client

from irminsul_backend.benchmarks.soak.harness import Soak
from irminsul_backend.benchmarks.soak.serving import Watched
from irminsul_backend.benchmarks.soak.wire import Http, Reply, Wire

MOST_ERROR_BYTES = 2000
TRACEBACK = re.compile(r"Traceback \(most recent|\.py\(\d+\)|File \"[^\"]+\.py\"|\b(Key|Type|Attribute|Index)Error\b")


class Case(NamedTuple):
    """One request, or several that belong together."""

    what: str
    bar: str
    act: Callable[[Desk], str]
    """Sends it; returns what was wrong with the answer, or ""."""


class Desk:
    """The ways to one server that a case may take."""

    def __init__(self, watched: Watched, soak: Soak) -> None:
        self.watched, self.soak = watched, soak
        self.wire = Wire(watched.grpc)
        self.http = Http(watched.http)
        self.client = Client(watched.grpc, timeout=60)

    def close(self) -> None:
        for way in (self.wire, self.http, self.client):
            way.close()

    def ids(self, **options: Any) -> tuple[int, ...]:
        """The answer's ids; plain greedy decoding without an end unless the options say otherwise."""
        request = {"text": "the order lacks a signature", "max_tokens": 6, "ignore_eos": True, **options}
        return self.client.generate(reuse="exact", **request).token_ids


def badly_refused(reply: Reply) -> str:
    """Why this is no clear refusal; "" if it is one."""
    if reply.hung:
        return "no answer within 20 s"
    if not reply.error:
        return f"served: {str(reply.outputs)[:120]}"
    if TRACEBACK.search(reply.error):
        return f"the message speaks of the server's inside: {reply.error[:120]}"
    return "" if len(reply.error) <= MOST_ERROR_BYTES else f"a message of {len(reply.error):,} bytes"
