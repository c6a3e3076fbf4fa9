"""Many requests at once on a real server: each gets its own answer, and all run together."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from irminsul_backend.triton_io.server.launcher import Server

pytestmark = pytest.mark.server

REQUESTS = 64


def make_requests() -> list[dict[str, Any]]:
    """Told apart by prompt, seed and length."""
    rng = np.random.default_rng(3)
    return [
        {
            "input_ids": rng.integers(0, 500, 20 + n, dtype=np.int32),
            "max_tokens": 3 + n % 5,
            "temperature": 0.0 if n % 4 == 0 else 3.0,
            "seed": n,
            "stream": n % 3 != 0,
            "ignore_eos": True,
            "reuse": "off",
        }
        for n in range(REQUESTS)
    ]


class TestTags:
    """Sixty-four requests at once, each against its own answer when alone."""

    def test_every_answer_is_its_own(self, stream: Any) -> None:
        requests = make_requests()
        alone = [stream.ask(**request) for request in requests]
        together = stream.answers([stream.send(**request) for request in requests])
        for request, one, other in zip(requests, alone, together, strict=True):
            assert other.joined("output_ids") == one.joined("output_ids")
            assert len(other.joined("output_ids")) == request["max_tokens"]
            usage = json.loads(other.responses[-1]["usage"])
            assert usage["prompt_tokens"] == len(request["input_ids"]) == sum(other.joined("num_input_tokens"))
            assert [r["index"] for r in other.responses] == [[i] for i in range(len(other.responses))]
        assert len({tuple(answer.joined("output_ids")) for answer in alone}) > REQUESTS // 2


class TestTogether:
    def test_two_requests_are_decoded_in_the_same_steps(self, stream: Any) -> None:
        """While the second one's tokens come, the first one's come in between."""
        long = {"max_tokens": 200, "stream": True, "ignore_eos": True}
        first, second = stream.send(text_input="one", **long), stream.send(text_input="two", **long)
        order: list[str] = []
        while len(order) < 400:
            request_id, outputs = stream.receive()
            order += [request_id] * len(outputs["output_ids"])
        begin, end = order.index(second), len(order) - order[::-1].index(first)
        assert begin < 200 < end
        switches = sum(a != b for a, b in itertools.pairwise(order))
        assert switches > 20
        stream.answers([first, second])

    def test_turns_of_one_session_may_overlap(self, stream: Any) -> None:
        turns = [
            stream.send(session="overlap", start=n == 0, end=n == 7, text_input=f"turn {n}", max_tokens=5)
            for n in range(8)
        ]
        assert all(answer.responses for answer in stream.answers(turns))


class TestCancelling:
    @pytest.mark.parametrize("streamed", [True, False])
    def test_the_engine_stops_for_a_client_that_went_away(
        self, streamed: bool, server: Server, stream: Any, connect: Callable[[Server], Any]
    ) -> None:
        before = stream.status()["counters"].get("finished_cancelled", 0)
        gone = connect(server)
        gone.send(text_input="a client that does not wait", max_tokens=3000, stream=streamed, ignore_eos=True)
        while not stream.status()["running"]:
            pass
        gone.close(cancel=True)
        while (now := stream.status())["running"]:
            pass
        assert now["counters"]["finished_cancelled"] == before + 1
        assert now["integrity"] == "ok"

    def test_streams_closed_after_any_number_of_tokens(
        self, server: Server, stream: Any, connect: Callable[[Server], Any]
    ) -> None:
        """A cancel in the middle, at the last token and after the end: nothing breaks, nothing stays."""
        for tokens in range(24):
            one = connect(server)
            request = one.send(text_input=f"closed after {tokens}", max_tokens=16, stream=True, ignore_eos=True)
            seen = 0
            while seen < min(tokens, 16):
                seen += len(one.receive()[1]["output_ids"])
            if tokens > 16:
                one.answers([request])
            one.close(cancel=True)
        while (now := stream.status())["running"]:
            pass
        assert now["integrity"] == "ok"
        assert not stream.ask(text_input="still there", max_tokens=1).error
