"""The exceptions of the client.

IrminsulClientError
  - InvalidRequest
    - SessionExpired
    - SessionAlreadyOpen
  - ServerError
  - ServerUnavailable
  - RequestTimeout
  - RequestCancelled
"""

from __future__ import annotations

import re


class IrminsulClientError(Exception):
    """Base class of all errors that the client raises on purpose; the message is the server's own where it sent one."""


class InvalidRequest(IrminsulClientError):
    """The request is wrong as it stands; sending it again gives the same answer."""


class SessionExpired(InvalidRequest):
    """The server does not know the session (idle too long, ended, server restarted); opening it again did not help."""


class SessionAlreadyOpen(InvalidRequest):
    """The session was opened before, by this client or another one."""


class ServerError(IrminsulClientError):
    """The server failed at this request, or its answer cannot be understood."""


class ServerUnavailable(IrminsulClientError):
    """No server answers at the address, the model is not loaded there, or the connection broke."""


class RequestTimeout(IrminsulClientError):
    """The request was not finished within its timeout; it was cancelled on the server."""


class RequestCancelled(IrminsulClientError):
    """The request was cancelled by somebody else: the client was closed, or the server shut down."""


FAULT_OF_THE_SERVER = re.compile(
    r"\b[A-Z]\w*(Error|Exception): |stub process|shared memory|internal error", re.IGNORECASE
)
"""Messages about a failure inside the server: an exception that nobody foresaw comes with its class name, a dead
process of the Python backend with Triton's own words."""


def server_error(message: str) -> IrminsulClientError:
    """The error for a message that the server sent in place of an answer. A stream carries no status code."""
    lowered = message.lower()
    if "must specify the start flag" in lowered or "unknown or expired" in lowered:
        return SessionExpired(message)
    if "already open" in lowered:
        return SessionAlreadyOpen(message)
    if "unknown model" in lowered or "is not ready" in lowered or "unavailable" in lowered:
        return ServerUnavailable(message)
    if FAULT_OF_THE_SERVER.search(message):
        return ServerError(message)
    return InvalidRequest(message)
