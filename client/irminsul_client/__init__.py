"""Client for an Irminsul server: streaming over gRPC, sessions, usage, and plain HTTP.

>>> from irminsul_client import Client
>>> with Client("localhost:8001") as client, client.session() as session:
...     for chunk in session.stream(messages=[{"role": "user", "content": "Hello"}], max_tokens=32):
...         print(chunk.text, end="", flush=True)
"""

from irminsul_client._client import Client, Session
from irminsul_client._http import HTTPClient
from irminsul_client._inputs import RequestOptions, Reuse
from irminsul_client._types import Chunk, Completion, Usage
from irminsul_client.errors import (
    InvalidRequest,
    IrminsulClientError,
    RequestCancelled,
    RequestTimeout,
    ServerError,
    ServerUnavailable,
    SessionAlreadyOpen,
    SessionExpired,
)

__version__ = "0.1.0"

__all__ = [
    "Chunk",
    "Client",
    "Completion",
    "HTTPClient",
    "InvalidRequest",
    "IrminsulClientError",
    "RequestCancelled",
    "RequestOptions",
    "RequestTimeout",
    "Reuse",
    "ServerError",
    "ServerUnavailable",
    "Session",
    "SessionAlreadyOpen",
    "SessionExpired",
    "Usage",
    "__version__",
]
