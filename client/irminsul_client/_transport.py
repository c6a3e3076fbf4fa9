"""The seam between the client and the network: one call sends one request and yields its responses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class Request:
    """One request as the transport sends it."""

    fields: Mapping[str, Any]
    """Tensor name → plain value, see ``_request.build_fields``."""
    session_id: str
    start: bool
    end: bool
    id: str
    """Unique name, for the server's logs and traces."""


@dataclass(frozen=True)
class Response:
    """One response: output name → str, or list of numbers. Empty outputs with ``final`` only mark the end."""

    outputs: Mapping[str, Any]
    final: bool


class Call(Protocol):
    """A request on its way. Iterating yields its responses and raises IrminsulClientError if it failed."""

    def __iter__(self) -> Iterator[Response]: ...

    def cancel(self) -> None:
        """Stop this request here and on the server; nothing happens if it has ended."""


class Transport(Protocol):
    """What a Client needs of the network. Calls may run at the same time in several threads."""

    def call(self, request: Request, timeout: float | None) -> Call:
        """Send a request; ``timeout`` in seconds covers it until its last response."""

    def check_ready(self, timeout: float) -> None:
        """Raise ServerUnavailable, saying why, unless the model can be called."""

    def close(self) -> None:
        """Cancel what is running and release the connection."""
