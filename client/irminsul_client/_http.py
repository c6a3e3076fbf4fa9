"""The HTTP client: Triton's generate endpoints, for places that cannot hold a gRPC stream."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import httpx

from irminsul_client._client import DEFAULT_TIMEOUT
from irminsul_client._grpc import encode_tensor
from irminsul_client._inputs import TENSORS, RequestOptions
from irminsul_client._request import build_fields
from irminsul_client._types import Chunk, Completion, chunk_from_outputs
from irminsul_client.errors import InvalidRequest, RequestTimeout, ServerError, ServerUnavailable, server_error

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack


JSON_HEADERS = {"Content-Type": "application/json"}


def default_http_url() -> str:
    """The server's HTTP address: ``IRMINSUL_HTTP_URL``, or http://localhost:8000."""
    return os.environ.get("IRMINSUL_HTTP_URL") or "http://localhost:8000"


class HTTPClient:
    """Generates over HTTP: ``irminsul_unary`` for whole answers, ``irminsul_generate`` for streamed ones.

    A session is named with each request (``session_id``); the server opens it by itself. ``timeout`` in seconds limits
    a whole answer, or the pause between two pieces of a streamed one; a request's own ``timeout`` replaces it.
    ``transport`` is httpx's seam, for tests.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        timeout: float | None = DEFAULT_TIMEOUT,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        address = url or default_http_url()
        self._url = address if "://" in address else f"http://{address}"
        self._http = httpx.Client(base_url=self._url, timeout=timeout, transport=transport)

    def generate(
        self,
        *,
        session_id: str | None = None,
        end: bool = False,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Completion:
        """POST /generate and wait. Nothing streams, so ttft_ms is the time to the whole answer."""
        body = _encode(build_fields(options, stream=False), session_id, end)
        begin = time.perf_counter()
        with self._translating():
            response = self._http.post(
                "/v2/models/irminsul_unary/generate", content=body, headers=JSON_HEADERS, timeout=_limit(timeout)
            )
        _check(response)
        elapsed = (time.perf_counter() - begin) * 1e3
        chunk = chunk_from_outputs(_parse(response.text)) or Chunk("")
        return Completion(
            chunk.text, chunk.token_ids, chunk.log_probs, chunk.finish_reason, chunk.usage, elapsed, (), elapsed
        )

    def stream(
        self,
        *,
        session_id: str | None = None,
        end: bool = False,
        timeout: float | None = None,
        **options: Unpack[RequestOptions],
    ) -> Iterator[Chunk]:
        """POST /generate_stream and yield chunks; closing the iterator drops the connection, which cancels."""
        return self._stream(_encode(build_fields(options, stream=True), session_id, end), timeout)

    def check_ready(self, timeout: float = 5.0) -> None:
        """Raise ServerUnavailable, saying why, unless the server is ready for requests."""
        with self._translating():
            response = self._http.get("/v2/health/ready", timeout=timeout)
        if response.status_code != 200:
            raise ServerUnavailable(f"the server at {self._url} is not ready (status {response.status_code})")

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _stream(self, body: bytes, timeout: float | None) -> Iterator[Chunk]:
        path = "/v2/models/irminsul_generate/generate_stream"
        finished = False
        with (
            self._translating(),
            self._http.stream("POST", path, content=body, headers=JSON_HEADERS, timeout=_limit(timeout)) as response,
        ):
            if response.status_code != 200:
                response.read()
                _check(response)
            for line in response.iter_lines():
                if not line.startswith("data:"):
                    continue
                outputs = _parse(line[len("data:") :])
                if "error" in outputs:
                    raise server_error(str(outputs["error"]))
                chunk = chunk_from_outputs(outputs)
                if chunk is not None:
                    finished = chunk.finish_reason != ""
                    yield chunk
        if not finished:
            raise ServerError("the stream ended before the answer was complete")

    @contextmanager
    def _translating(self) -> Iterator[None]:
        try:
            yield
        except httpx.TimeoutException as error:
            raise RequestTimeout(f"no answer from {self._url} within the timeout ({type(error).__name__})") from error
        except httpx.HTTPError as error:
            raise ServerUnavailable(f"cannot reach an Irminsul server at {self._url} ({error})") from error


def _limit(timeout: float | None) -> Any:
    """httpx's timeout of a request; None: the client's."""
    return httpx.USE_CLIENT_DEFAULT if timeout is None else timeout


def _encode(fields: dict[str, Any], session_id: str | None, end: bool) -> bytes:
    if session_id is not None:
        fields |= {"session_id": session_id, "session_end": end}
    for name, value in fields.items():
        # Triton wraps integers that do not fit without a word. Other numbers are its own to judge.
        if not TENSORS[name].datatype.startswith(("FP", "BOOL")):
            encode_tensor(name, value)
    try:
        return json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request cannot be written as JSON: {error}") from error


def _check(response: httpx.Response) -> None:
    if response.status_code == 200:
        return
    try:
        message = str(json.loads(response.text.removeprefix("data:"))["error"])
    except (ValueError, KeyError, TypeError):
        raise ServerError(f"status {response.status_code}: {response.text[:200]!r}") from None
    raise server_error(message)


def _parse(text: str) -> dict[str, Any]:
    try:
        outputs = json.loads(text)
    except ValueError as error:
        raise ServerError(f"the server's answer is not JSON: {text[:200]!r}") from error
    if not isinstance(outputs, dict):
        raise ServerError(f"the server's answer is not a JSON object: {text[:200]!r}")
    return outputs
