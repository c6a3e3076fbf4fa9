"""The clients against a real tritonserver with the shipped model."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from irminsul_client import Client, HTTPClient, InvalidRequest, RequestTimeout

pytestmark = pytest.mark.server

MESSAGES = [{"role": "system", "content": "Be brief. " * 40}, {"role": "user", "content": "Say α."}]


@pytest.fixture(scope="module")
def client(server: Any) -> Any:
    with Client(server.grpc_url) as client:
        client.check_ready()
        yield client


@pytest.fixture(scope="module")
def http(server: Any) -> Any:
    with HTTPClient(server.http_url) as client:
        client.check_ready()
        yield client


class TestGrpc:
    def test_stream_and_usage(self, client: Client) -> None:
        chunks = list(client.stream(messages=MESSAGES, max_tokens=6, ignore_eos=True, cache_salt="stream"))
        assert sum(len(c.token_ids) for c in chunks) == 6
        assert [c.index for c in chunks] == sorted({c.index for c in chunks})
        assert [bool(c.finish_reason) for c in chunks] == [False] * (len(chunks) - 1) + [True]
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.prompt_tokens == usage.computed_tokens
        assert usage.completion_tokens == 6

    def test_log_probs_and_echo(self, client: Client) -> None:
        answer = client.generate(text="one two", max_tokens=3, ignore_eos=True, return_log_probs=True, echo=True)
        assert answer.text.startswith("one two")
        assert len(answer.log_probs) == len(answer.token_ids) == 3
        assert all(p <= 0 for p in answer.log_probs)

    @pytest.mark.parametrize("id", ["agent-7/α", "0", "18446744073709551616", "é" * 64])
    def test_sessions_reuse_their_prompt(self, client: Client, id: str) -> None:
        with client.session(id, cache_salt=f"salt {id}") as session:
            first = session.generate(messages=MESSAGES, max_tokens=2)
            longer = [*MESSAGES, {"role": "assistant", "content": "α"}, {"role": "user", "content": "Again."}]
            second = session.generate(messages=longer, max_tokens=2)
        assert first.usage is not None
        assert second.usage is not None
        assert first.usage.exact_tokens == 0
        assert second.usage.exact_tokens > first.usage.prompt_tokens // 2

    def test_an_open_session_is_joined_and_an_ended_one_reopened(self, client: Client) -> None:
        first, second = client.session("joined"), client.session("joined")
        first.generate(text="one", max_tokens=1)
        second.generate(text="two", max_tokens=1)
        second.close()
        first.generate(text="three", max_tokens=1)
        first.close()

    def test_a_bad_request_fails_alone(self, client: Client) -> None:
        with client.session() as session:
            with pytest.raises(InvalidRequest, match="temperature"):
                session.generate(text="x", temperature=-1.0)
            assert session.generate(text="x", max_tokens=1).finish_reason
        with pytest.raises(InvalidRequest, match="128"):
            client.session("x" * 129).generate(text="x")

    def test_timeout(self, client: Client) -> None:
        with pytest.raises(RequestTimeout):
            client.generate(text="x", max_tokens=50_000, ignore_eos=True, timeout=0.5)
        assert client.generate(text="x", max_tokens=1).finish_reason

    def test_streams_closed_early_harm_nobody(self, client: Client) -> None:
        rng = random.Random(2)
        counts = [rng.randint(0, 9) for _ in range(80)]
        expected = client.generate(text="steady", max_tokens=40, ignore_eos=True, reuse="off").token_ids
        steady: list[tuple[int, ...]] = []

        def keep_on() -> None:
            for _ in range(3):
                answer = client.generate(text="steady", max_tokens=40, ignore_eos=True, reuse="off")
                steady.append(answer.token_ids)

        def close_after(count: int) -> None:
            stream = client.stream(text=f"stream {count}", max_tokens=8, ignore_eos=True)
            for _ in range(count):
                next(stream, None)
            stream.close()  # type: ignore[attr-defined]

        thread = threading.Thread(target=keep_on)
        thread.start()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(close_after, counts))
        thread.join()
        assert steady == [expected] * 3
        client.check_ready()


class TestHttp:
    def test_both_ways_give_what_grpc_gives(self, client: Client, http: HTTPClient) -> None:
        options: Any = {"messages": MESSAGES, "max_tokens": 8, "ignore_eos": True, "reuse": "off"}
        expected = client.generate(**options)
        whole = http.generate(**options)
        chunks = list(http.stream(**options))
        assert (whole.text, whole.token_ids) == (expected.text, expected.token_ids)
        assert "".join(c.text for c in chunks) == expected.text
        assert tuple(i for c in chunks for i in c.token_ids) == expected.token_ids
        assert whole.usage is not None
        assert whole.usage.prompt_tokens == expected.usage.prompt_tokens  # type: ignore[union-attr]
        assert chunks[-1].usage is not None

    def test_sessions(self, http: HTTPClient) -> None:
        options: Any = {"messages": MESSAGES, "max_tokens": 1, "session_id": "http/α", "cache_salt": "http"}
        assert http.generate(**options).usage.exact_tokens == 0  # type: ignore[union-attr]
        (last,) = [c for c in http.stream(**options) if c.usage]
        assert last.usage.exact_tokens > 0  # type: ignore[union-attr]
        http.generate(**options, end=True)

    def test_bad_requests(self, http: HTTPClient) -> None:
        with pytest.raises(InvalidRequest, match="top_p is 2"):
            http.generate(text="x", top_p=2.0)
        with pytest.raises(InvalidRequest, match="top_p is 2"):
            list(http.stream(text="x", top_p=2.0))
