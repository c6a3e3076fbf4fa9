"""Errors that Irminsul raises on purpose. A message says what was wrong, the value and the limit, and what to do."""


class IrminsulError(Exception):
    """Base of all errors below."""


class InvalidRequestError(IrminsulError):
    """The request itself is wrong; it fails alone and changes nothing else."""


class SessionError(InvalidRequestError):
    """The session is unknown, expired, already open, or its id is not allowed."""


class UnsupportedModelError(IrminsulError):
    """A model folder lacks a file or names something not understood; raised at start-up with field and value."""


class CapacityError(IrminsulError):
    """The cache cannot hold what the request needs, even when everything that nobody holds is evicted."""


class UnavailableError(IrminsulError):
    """The server takes no new requests any more; another one, or this one once it is back, may take it."""


class ServerStartError(IrminsulError):
    """The server cannot start here; the message names what is missing and the remedy."""
