"""Which error stands for which message of the server."""

from __future__ import annotations

import pytest
from irminsul_client import (
    InvalidRequest,
    IrminsulClientError,
    ServerError,
    ServerUnavailable,
    SessionAlreadyOpen,
    SessionExpired,
)
from irminsul_client.errors import server_error


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        ("inference request for sequence 7 must specify the START flag on the first request", SessionExpired),
        ("in ensemble 'irminsul', session 'a' is unknown or expired (idle limit 600.0 s)", SessionExpired),
        ("in ensemble 'irminsul', session 'a' is already open", SessionAlreadyOpen),
        ("in ensemble 'irminsul', temperature is nan; it must be a finite number", InvalidRequest),
        ("KeyError: 'kv'", ServerError),
        ("in ensemble 'irminsul', RuntimeError: out of memory", ServerError),
        ("Stub process 'irminsul_engine_0' is not healthy.", ServerError),
        ("Request for unknown model: 'irminsul' is not found", ServerUnavailable),
    ],
)
def test_message_decides(message: str, kind: type[IrminsulClientError]) -> None:
    error = server_error(message)
    assert type(error) is kind
    assert str(error) == message


def test_every_error_is_one_kind() -> None:
    assert issubclass(SessionExpired, InvalidRequest)
    assert not issubclass(ServerError, InvalidRequest)
    assert issubclass(ServerUnavailable, IrminsulClientError)
