"""What the detokenizer makes of events, with the shipped tokenizer and without a server."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.errors import IrminsulError
from irminsul_backend.frontend.replies import Reply, TranscriptTable
from irminsul_backend.protocol import Event, GenerationRequest, Usage
from irminsul_backend.text import IncrementalDetokenizer, Tokenizer

USAGE = Usage(prompt_tokens=5, exact_tokens=1, shifted_tokens=2, computed_tokens=2, segments=2, completion_tokens=4)
TEXT = "The müde agent opens file number seven"


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


@pytest.fixture
def table(tokenizer: Tokenizer) -> TranscriptTable:
    return TranscriptTable(lambda request: IncrementalDetokenizer(tokenizer, request.stop_words))


def here() -> bool:
    """The client has not gone."""
    return False


def events(ids: Sequence[int], request: GenerationRequest, reason: str = "length") -> list[Event]:
    """Admitted, progress, one token each, finished."""
    kinds = [Event(request.key, 0, "admitted", request=request), Event(request.key, 1, "progress", prefilled=5)]
    kinds += [Event(request.key, 2 + n, "tokens", [i], [-0.5]) for n, i in enumerate(ids)]
    return [*kinds, Event(request.key, len(kinds), "finished", finish_reason=reason, usage=USAGE)]


def play(table: TranscriptTable, script: Sequence[Event]) -> tuple[list[Reply], list[int]]:
    """The replies, and the indices of the events after which the engine should be stopped."""
    outcomes = [table.feed(event, here) for event in script]
    return [r for r, _ in outcomes if r is not None], [e.index for e, (_, s) in zip(script, outcomes, strict=True) if s]


class TestReplies:
    def test_streamed_and_whole_say_the_same(self, table: TranscriptTable, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode(TEXT).ids.tolist()
        streamed, _ = play(table, events(ids, GenerationRequest("a", stream=True)))
        whole, _ = play(table, events(ids, GenerationRequest("b", stream=False)))
        assert len(streamed) == len(ids) + 3
        assert len(whole) == 1
        merged = Reply()
        for reply in streamed:
            merged.add(reply)
        assert merged == whole[0]
        assert whole[0].text_output == TEXT
        assert whole[0].output_ids == ids
        assert whole[0].output_log_probs == [-0.5] * len(ids)
        assert (whole[0].num_input_tokens, whole[0].num_output_tokens) == (5, len(ids))
        assert json.loads(whole[0].usage)["shifted_tokens"] == 2
        assert [reply.index for reply in streamed] == list(range(len(streamed)))
        assert len(table) == 0

    def test_the_echo_comes_once_in_front(self, table: TranscriptTable, tokenizer: Tokenizer) -> None:
        ids = tokenizer.encode(TEXT).ids.tolist()
        for stream in (True, False):
            replies, _ = play(table, events(ids, GenerationRequest("a", stream=stream, echo="before ")))
            assert "".join(reply.text_output for reply in replies) == "before " + TEXT

    @pytest.mark.parametrize("stream", [True, False])
    def test_requests_do_not_mix(self, stream: bool, table: TranscriptTable, tokenizer: Tokenizer) -> None:
        texts = [f"answer number {n}" for n in range(5)]
        scripts = [
            events(tokenizer.encode(text).ids.tolist(), GenerationRequest(f"key {n}", stream=stream))
            for n, text in enumerate(texts)
        ]
        said = dict.fromkeys(range(5), "")
        for step in range(max(map(len, scripts))):
            for n, script in enumerate(scripts):
                if step < len(script) and (reply := table.feed(script[step], here)[0]) is not None:
                    said[n] += reply.text_output
        assert list(said.values()) == texts


class TestStopWords:
    @pytest.mark.parametrize("stream", [True, False])
    def test_the_engine_is_stopped_once_and_what_follows_is_silent(
        self, stream: bool, table: TranscriptTable, tokenizer: Tokenizer
    ) -> None:
        ids = tokenizer.encode(TEXT).ids.tolist()
        request = GenerationRequest("a", stream=stream, stop_words=(" opens",))
        replies, stops = play(table, events(ids, request, reason="cancelled"))
        assert "".join(reply.text_output for reply in replies) == "The müde agent"
        assert len(stops) == 1
        assert sum(len(reply.output_ids) for reply in replies) == stops[0] - 1
        assert replies[-1].finish_reason == "stop"
        assert replies[-1].usage

    def test_text_held_back_for_a_stop_word_comes_at_the_end(
        self, table: TranscriptTable, tokenizer: Tokenizer
    ) -> None:
        ids = tokenizer.encode(TEXT).ids.tolist()
        request = GenerationRequest("a", stream=True, stop_words=("seven men",))
        replies, stops = play(table, events(ids, request))
        assert "".join(reply.text_output for reply in replies) == TEXT
        assert replies[-1].text_output
        assert not stops


class TestTrouble:
    def test_a_cancelled_client_stops_the_engine_once(self, tokenizer: Tokenizer) -> None:
        table = TranscriptTable(lambda request: IncrementalDetokenizer(tokenizer), ask_every_s=0)
        script = events([5, 6, 7], GenerationRequest("a", stream=True))
        stops = [table.feed(event, lambda index=event.index: index >= 2)[1] for event in script]
        assert stops == ["", "", "cancelled", "", "", ""]

    def test_the_server_is_not_asked_at_every_token(self, tokenizer: Tokenizer) -> None:
        asked: list[bool] = []
        table = TranscriptTable(lambda request: IncrementalDetokenizer(tokenizer), ask_every_s=3600)
        for event in events([5, 6, 7], GenerationRequest("a", stream=True)):
            table.feed(event, lambda: bool(asked.append(True)))
        assert not asked

    def test_an_error_is_passed_on_and_forgotten(self, table: TranscriptTable) -> None:
        table.feed(events([], GenerationRequest("a"))[0], here)
        with pytest.raises(IrminsulError, match="out of slots"):
            table.feed(Event("a", 1, "error", error="out of slots"), here)
        assert len(table) == 0

    def test_lost_events_are_an_error(self, table: TranscriptTable) -> None:
        script = events([5, 6, 7], GenerationRequest("a"))
        table.feed(script[0], here)
        for event in script[2:]:
            with pytest.raises(IrminsulError, match="'a' were lost"):
                table.feed(event, here)
        assert len(table) == 0

    def test_memory_is_bounded_when_requests_never_end(self, tokenizer: Tokenizer) -> None:
        table = TranscriptTable(lambda request: IncrementalDetokenizer(tokenizer), max_open=3)
        for n in range(10):
            table.feed(Event(f"{n}", 0, "admitted", request=GenerationRequest(f"{n}")), here)
        assert len(table) == 3
