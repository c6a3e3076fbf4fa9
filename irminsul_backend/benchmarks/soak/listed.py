"""Every request that once brought the server down, or got what it should not: refused by name, or served right."""

from __future__ import annotations

from collections.abc import Iterator

from irminsul_backend.benchmarks.soak.desk import Desk
from irminsul_backend.benchmarks.soak.harness import Row, Soak
from irminsul_backend.benchmarks.soak.hostile import cases
from irminsul_backend.benchmarks.soak.neighbour import Neighbour
from irminsul_backend.benchmarks.soak.serving import Watched
from irminsul_backend.config import ServerConfig


def listed(soak: Soak) -> Iterator[Row]:
    """Each case in turn on one server, while a normal stream runs beside them all."""
    with Watched(soak, "listed", ServerConfig(log_level="WARNING", capacity_tokens=65_536)) as watched:
        neighbour = Neighbour(watched.grpc)
        with neighbour:
            for what, bar, act in cases():
                desk = Desk(watched, soak)
                try:
                    found = act(desk)
                except Exception as error:  # a case that cannot be sent is a bar missed, and the others still count
                    found = f"not as expected: {type(error).__name__}: {error}"[:200]
                finally:
                    desk.close()
                if watched.recover(what):
                    found = f"{watched.deaths[-1].rpartition(': ')[2]} ({found or 'the request itself was fine'})"
                soak.say(f"{what}: {found or 'ok'}")
                yield Row(what, bar, found or "ok", not found)
        yield from neighbour.rows()
        yield Row("the server beside all that", "0 deaths", f"{len(watched.deaths)} deaths", not watched.deaths)
