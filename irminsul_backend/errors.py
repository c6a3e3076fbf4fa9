"""Errors that Irminsul raises on purpose. A message says what was wrong, the value and the limit, and what to do."""

SHOWN_CHARACTERS = 80


def shown(value: object, most: int = SHOWN_CHARACTERS) -> str:
    """Format a value that a client sent for an error message: its repr, cut to about `most` characters."""
    if isinstance(value, (str, bytes)) and len(value) > most:
        return f"{value[:most]!r}… ({len(value)} {'bytes' if isinstance(value, bytes) else 'characters'})"
    text = repr(value)
    return text if isinstance(value, (str, bytes)) or len(text) <= most else f"{text[:most]}… ({len(text)} characters)"


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


class ServerStartError(IrminsulError):
    """The server cannot start here; the message names what is missing and the remedy."""


class UnavailableError(IrminsulError):
    """The server takes no requests now: it is shutting down, or its engine has failed."""


class OverloadedError(UnavailableError):
    """As many requests wait as the settings allow; the message says how many, and when to try again."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
