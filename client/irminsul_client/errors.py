"""Every error the client raises on purpose. Catch IrminsulClientError for all of them."""

from __future__ import annotations


class IrminsulClientError(Exception):
    """Base of all errors below; the message is the server's own where it sent one."""


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


class TraceError(IrminsulClientError):
    """A trace file cannot be read; the message names file, line and what is wrong there."""


def server_error(message: str, *, invalid: bool | None = None) -> IrminsulClientError:
    """The error for a message that the server sent with a request.

    ``invalid`` says whether the transport knows (from a status code) that the request is at fault. Where it does not,
    the message decides: the server prefixes failures of its own with the class name of an internal error.
    """
    lowered = message.lower()
    if "must specify the start flag" in lowered or "unknown or expired" in lowered:
        return SessionExpired(message)
    if "already open" in lowered:
        return SessionAlreadyOpen(message)
    if "unknown model" in lowered or "is not ready" in lowered or "model is unavailable" in lowered:
        return ServerUnavailable(message)
    return InvalidRequest(message) if invalid else ServerError(message)
