"""Client and Session: streaming generation over gRPC."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from irminsul_client._grpc import GrpcTransport
from irminsul_client._inputs import RequestOptions
from irminsul_client._request import build_fields
from irminsul_client._transport import Request, Transport
from irminsul_client._types import Chunk, Completion, chunk_from_outputs
from irminsul_client.errors import (
    InvalidRequest,
    IrminsulClientError,
    ServerError,
    ServerUnavailable,
    SessionAlreadyOpen,
    SessionExpired,
)

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

DEFAULT_TIMEOUT = 600.0
CLOSE_TIMEOUT = 5.0


def default_url() -> str:
    """The server's gRPC address: ``IRMINSUL_URL``, or localhost:8001."""
    return os.environ.get("IRMINSUL_URL") or "localhost:8001"


class Client:
    """Streams answers from an Irminsul server over gRPC. Safe to share between threads.

    ``url`` is host:port (default: see default_url), ``model`` the Triton model to call, ``timeout`` the most seconds
    a request may take (None: no limit). ``transport`` replaces the network, for tests.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        model: str = "irminsul",
        timeout: float | None = DEFAULT_TIMEOUT,
        transport: Transport | None = None,
    ) -> None:
        self._transport = transport or GrpcTransport(url or default_url(), model)
        self._timeout = timeout

    def session(self, id: str | None = None, *, cache_salt: str | None = None) -> Session:
        """A session: requests in which the server remembers the last prompt. ``id``: up to 128 bytes, else random."""
        return Session(self, id, cache_salt=cache_salt)

    def stream(self, *, timeout: float | None = None, **options: Unpack[RequestOptions]) -> Iterator[Chunk]:
        """Send one request outside any session and yield its chunks; closing the iterator cancels the request."""
        return Session(self, None).stream(end=True, timeout=timeout, **options)

    def generate(self, *, timeout: float | None = None, **options: Unpack[RequestOptions]) -> Completion:
        """Send one request outside any session and wait for its whole answer."""
        return collect(self.stream(timeout=timeout, **options))

    def check_ready(self, timeout: float = 5.0) -> None:
        """Raise ServerUnavailable, saying why, unless the server is ready for requests."""
        self._transport.check_ready(timeout)

    def close(self) -> None:
        """Cancel what is running (it raises RequestCancelled) and close the connection."""
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class Session:
    """One agent's conversation. Use it from one thread at a time; several sessions may run at once on one Client.

    The first request opens it on the server, leaving the ``with`` block ends it there. A session that the server
    has forgotten is opened again by itself, and one that is open already is joined.
    """

    def __init__(self, client: Client, id: str | None, *, cache_salt: str | None = None) -> None:
        if id == "":
            raise InvalidRequest("a session id must not be empty; leave it out to get a random one")
        self.id = id if id is not None else str(uuid.uuid4())
        self._client = client
        self._cache_salt = cache_salt
        self._open = False

    def stream(
        self, *, end: bool = False, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Iterator[Chunk]:
        """Send a request and yield its chunks as they come; closing the iterator cancels this request only.

        ``end`` ends the session with this request. ``timeout`` in seconds replaces the client's. Raises
        InvalidRequest at once for arguments that cannot be sent, and any IrminsulClientError while iterating.
        """
        if self._cache_salt is not None:
            options.setdefault("cache_salt", self._cache_salt)
        fields = build_fields(options, stream=True)
        return self._run(fields, end, timeout if timeout is not None else self._client._timeout)

    def generate(
        self, *, end: bool = False, timeout: float | None = None, **options: Unpack[RequestOptions]
    ) -> Completion:
        """Send a request and wait for its whole answer. Arguments and errors are those of ``stream``."""
        return collect(self.stream(end=end, timeout=timeout, **options))

    def close(self) -> None:
        """End the session on the server, if it is open. Never raises for what the server says to that."""
        if self._open:
            self._open = False
            # The server closes the session before it looks for a prompt, so its complaint about a missing one is fine.
            with suppress(IrminsulClientError):
                for _ in self._attempt({"max_tokens": 1}, start=False, end=True, timeout=CLOSE_TIMEOUT):
                    pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _run(self, fields: dict[str, Any], end: bool, timeout: float | None) -> Iterator[Chunk]:
        """One request, sent again with the other START flag if the server's view of the session differs.

        A refusal for that reason comes before any chunk, so nothing is ever yielded twice. Two refusals in a row
        happen when START and END together met an open session: the refused request has ended it.
        """
        start = not self._open
        self._open = not end
        for refusals_left in (2, 1, 0):
            try:
                yield from self._attempt(fields, start, end, timeout)
                return
            except SessionExpired:
                if start or not refusals_left:
                    raise
                start = True
            except SessionAlreadyOpen:
                if not start or not refusals_left:
                    raise
                start = False
            except ServerUnavailable:
                self._open = False
                raise

    def _attempt(self, fields: dict[str, Any], start: bool, end: bool, timeout: float | None) -> Iterator[Chunk]:
        request = Request(fields, self.id, start, end, id=str(uuid.uuid4()))
        call = self._client._transport.call(request, timeout)
        complete = False
        try:
            for response in call:
                complete |= response.final
                chunk = chunk_from_outputs(response.outputs)
                if chunk is not None:
                    yield chunk
        finally:
            call.cancel()
        if not complete:
            raise ServerError("the stream ended before the answer was complete")


def collect(chunks: Iterable[Chunk]) -> Completion:
    """Read a stream to its end. Times count from this call, which is when a stream sends its request."""
    begin = last = time.perf_counter()
    ttft: float | None = None
    gaps: list[float] = []
    parts: list[Chunk] = []
    for chunk in chunks:
        now = time.perf_counter()
        parts.append(chunk)
        count = len(chunk.token_ids)
        if ttft is None:
            ttft = now - begin
            last = now
        elif count:
            gaps += [(now - last) / count] * count
            last = now
    end = time.perf_counter()
    return Completion(
        text="".join(c.text for c in parts),
        token_ids=tuple(i for c in parts for i in c.token_ids),
        log_probs=tuple(p for c in parts for p in c.log_probs),
        finish_reason=parts[-1].finish_reason if parts else "",
        usage=parts[-1].usage if parts else None,
        ttft_ms=(end - begin if ttft is None else ttft) * 1e3,
        inter_token_ms=tuple(g * 1e3 for g in gaps),
        total_ms=(end - begin) * 1e3,
    )
