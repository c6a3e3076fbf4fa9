"""The HTTP client against a real HTTP server that answers as Triton's generate endpoints do."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from irminsul_client import HTTPClient, InvalidRequest, RequestTimeout, ServerError, ServerUnavailable, SessionExpired

USAGE = json.dumps({"prompt_tokens": 3, "exact_tokens": 1, "shifted_tokens": 0, "computed_tokens": 2, "segments": 1})
LAST = {"text_output": "", "output_ids": [], "finish_reason": "stop", "usage": USAGE, "index": 3}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self.reply(200 if self.path == "/v2/health/ready" else 404, b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        seen: list[tuple[str, dict[str, Any]]] = self.server.seen  # type: ignore[attr-defined]
        seen.append((self.path, body))
        text = body.get("text_input", "")
        if text == "bad":
            event = b"data: " if self.path.endswith("_stream") else b""
            self.reply(400, event + b'{"error":"max_tokens is 0; it must be at least 1"}\n\n')
        elif text == "gone":
            self.reply(500, b'{"error":"session \'a\' is unknown or expired"}')
        elif text == "html":
            self.reply(502, b"<html>gateway</html>")
        elif text == "slow":
            self.server.release.wait(20)  # type: ignore[attr-defined]
            self.reply(200, b"{}")
        elif self.path.endswith("/generate"):
            answer = {"text_output": "a b", "output_ids": [1, 2], "finish_reason": "stop", "usage": USAGE}
            self.reply(200, json.dumps(answer).encode())
        else:
            events: list[dict[str, Any]] = [{"text_output": "", "index": 0}]
            events += [{"text_output": w, "output_ids": i, "index": i} for i, w in enumerate(text.split(), 1)]
            if text.startswith("fail"):
                events.append({"error": "KeyError: the engine failed"})
            elif text != "cut":
                events.append(LAST)
            self.reply(200, b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events), "text/event-stream")

    def reply(self, status: int, body: bytes, kind: str = "application/json") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def server() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen = []  # type: ignore[attr-defined]
    server.release = threading.Event()  # type: ignore[attr-defined]
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.release.set()  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()


@pytest.fixture
def client(server: Any) -> Iterator[HTTPClient]:
    with HTTPClient(f"127.0.0.1:{server.server_port}") as client:
        yield client


class TestHTTPClient:
    def test_generate(self, client: HTTPClient, server: Any) -> None:
        client.check_ready()
        answer = client.generate(text="hello", session_id="agent-7/α", end=True, max_tokens=2, seed=2**64 - 1)
        assert (answer.text, answer.token_ids, answer.finish_reason) == ("a b", (1, 2), "stop")
        assert answer.usage is not None
        assert answer.usage.computed_tokens == 2
        path, body = server.seen[0]
        assert path == "/v2/models/irminsul_unary/generate"
        assert body == {
            "text_input": "hello",
            "session_id": "agent-7/α",
            "session_end": True,
            "max_tokens": 2,
            "seed": 2**64 - 1,
            "stream": False,
        }

    def test_stream(self, client: HTTPClient, server: Any) -> None:
        chunks = list(client.stream(text="one two"))
        assert [(c.text, c.token_ids, c.index) for c in chunks] == [("one", (1,), 1), ("two", (2,), 2), ("", (), 3)]
        assert [c.usage is None for c in chunks] == [True, True, False]
        assert server.seen[0] == (
            "/v2/models/irminsul_generate/generate_stream",
            {"text_input": "one two", "stream": True},
        )

    def test_bad_requests(self, client: HTTPClient) -> None:
        with pytest.raises(InvalidRequest, match="max_tokens is 0"):
            client.generate(text="bad")
        with pytest.raises(InvalidRequest, match="max_tokens is 0"):
            list(client.stream(text="bad"))
        with pytest.raises(SessionExpired):
            client.generate(text="gone")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"temperature": float("nan")}, "JSON"),
            ({"text": b"x"}, "JSON"),
            ({"text": "\ud800"}, "text_input is"),
            ({"seed": object()}, "seed is"),
            ({"seed": -1}, "seed is -1"),
            ({"max_tokens": 2**32 + 3}, "max_tokens is 4294967299.*to 2147483647"),
            ({"max_tokens": 1.5}, r"max_tokens is 1\.5"),
            ({"top_k": 2**31}, "top_k is"),
            ({"reuse": 3}, "reuse is 3.*only text"),
            ({"stop_words": "abc"}, "stop_words must be a list of texts"),
            ({"session_id": 7}, "session_id is 7"),
        ],
    )
    def test_what_cannot_be_sent_is_named(
        self, client: HTTPClient, server: Any, options: dict[str, Any], message: str
    ) -> None:
        for call in (client.generate, client.stream):
            with pytest.raises(InvalidRequest, match=message):
                call(**{"text": "x", **options})
        assert server.seen == []

    def test_failures_of_the_server(self, client: HTTPClient) -> None:
        with pytest.raises(ServerError, match=r"502.*gateway"):
            client.generate(text="html")
        stream = client.stream(text="fail now")
        assert next(stream).text == "fail"
        with pytest.raises(ServerError, match="the engine failed"):
            list(stream)
        with pytest.raises(ServerError, match="before the answer was complete"):
            list(client.stream(text="cut"))

    def test_timeout(self, server: Any) -> None:
        with (
            HTTPClient(f"http://127.0.0.1:{server.server_port}", timeout=0.2) as client,
            pytest.raises(RequestTimeout, match="127"),
        ):
            client.generate(text="slow")

    def test_a_request_may_have_its_own_timeout(self, client: HTTPClient) -> None:
        with pytest.raises(RequestTimeout, match="127"):
            client.generate(text="slow", timeout=0.2)
        with pytest.raises(RequestTimeout, match="127"):
            list(client.stream(text="slow", timeout=0.2))
        assert client.generate(text="x", timeout=20).text == "a b"

    def test_unreachable(self) -> None:
        with HTTPClient("127.0.0.1:1") as client, pytest.raises(ServerUnavailable, match=r"127\.0\.0\.1:1"):
            client.check_ready()
