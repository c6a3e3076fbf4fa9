"""Streaming text: independent of how ids arrive, whole characters, nothing of a stop word."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from irminsul_backend.text import IncrementalDetokenizer, Tokenizer
from irminsul_backend.text.tokenizers_library import TokenizersLibrary

WORDS = ["the", "agent", "a", "ab", "aba", "b", "\n\n", "🙂", "日", "</s>", "ag", "é"]
texts = st.lists(st.one_of(st.sampled_from([*WORDS, " "]), st.text(max_size=3)), max_size=20).map("".join)
stop_lists = st.lists(st.one_of(st.sampled_from(WORDS), st.text(min_size=1, max_size=3)), max_size=4)


def cut_at_first_stop(text: str, words: list[str]) -> tuple[str, bool]:
    """Character by character: stop where a word is complete; of several that end there, the longest."""
    for end in range(1, len(text) + 1):
        complete = [len(word) for word in words if text[:end].endswith(word)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


@pytest.fixture(scope="module")
def byte_level(definitions: dict[str, Any]) -> Tokenizer:
    return Tokenizer(TokenizersLibrary(json.dumps(definitions["byte_level"]), {}), {})


@pytest.fixture(scope="module")
def byte_fallback() -> Tokenizer:
    """The SentencePiece way: words that carry a mark, characters outside the vocabulary as byte tokens."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["▁", "a", "b", "the", "agent", "▁the", "▁agent", "\n", "é"]:
        vocab.setdefault(piece, len(vocab))
    library = tokenizers.Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(TokenizersLibrary(library.to_str(), {}), {})


def run(tokenizer: Tokenizer, ids: list[int], words: list[str], cuts: list[int]) -> tuple[list[str], bool]:
    detokenizer = IncrementalDetokenizer(tokenizer, words)
    bounds = [0, *sorted(cuts), len(ids)]
    parts = [detokenizer.push(ids[a:b]) for a, b in pairwise(bounds)]
    return [*parts, detokenizer.finish()], detokenizer.stopped


@settings(max_examples=250, deadline=None)
@given(texts, stop_lists, st.data())
@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_any_split_gives_the_text_up_to_the_stop_word(
    kind: str, request: pytest.FixtureRequest, text: str, words: list[str], data: st.DataObject
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    ids = tokenizer.encode(text).ids.tolist()
    whole = tokenizer.decode(ids)
    want = cut_at_first_stop(whole, words)
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=6))
    parts, stopped = run(tokenizer, ids, words, cuts)
    assert ("".join(parts), stopped) == want
    assert not any(word in "".join(parts) for word in words)
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in whole


@settings(max_examples=250, deadline=None)
@given(st.lists(st.integers(0, 2**30), max_size=40), st.data())
def test_any_ids_give_the_librarys_text(byte_level: Tokenizer, numbers: list[int], data: st.DataObject) -> None:
    """Ids as a bad model makes them: broken characters, special tokens, ids without a token."""
    ids = [number % (byte_level.vocab_size + 5) for number in numbers]
    parts, _ = run(byte_level, ids, [], data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    assert "".join(parts) == byte_level.decode(ids)


def test_broken_text_is_not_held_for_ever(byte_level: Tokenizer, byte_fallback: Tokenizer) -> None:
    for tokenizer, token in ((byte_level, byte_level.encode("👩").ids[0]), (byte_fallback, 0xE2)):
        detokenizer = IncrementalDetokenizer(tokenizer)
        text = "".join([detokenizer.push([token]) for _ in range(1000)])
        assert 900 < len(text) <= 1000
        assert text + detokenizer.finish() == "\ufffd" * 1000


def test_a_character_comes_whole(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("x👩y").ids.tolist()
    assert len(ids) > 3
    detokenizer = IncrementalDetokenizer(byte_level)
    assert [part for token in ids if (part := detokenizer.push([token]))] == ["x", "👩", "y"]


def test_text_comes_at_once_unless_a_stop_word_may_begin(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, ["STOP"])
    parts = [detokenizer.push(byte_level.encode(text).ids) for text in ["go S", "T", "x", "ST", "OP!", "more"]]
    assert parts == ["go ", "", "STx", "", "", ""]
    assert detokenizer.stopped
    assert detokenizer.finish() == ""


def test_finish_flushes_a_broken_character_and_half_a_stop_word(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, ["STOP"])
    ids = [*byte_level.encode("ST").ids.tolist(), byte_level.encode("👩").ids.tolist()[0]]
    assert detokenizer.push(ids) == ""
    assert detokenizer.finish() == "ST\ufffd"
    assert not detokenizer.stopped


def test_a_stop_word_may_end_in_the_flush(byte_level: Tokenizer) -> None:
    detokenizer = IncrementalDetokenizer(byte_level, ["\ufffd"])
    assert detokenizer.push([*byte_level.encode("a").ids, byte_level.encode("👩").ids[0]]) == "a"
    assert detokenizer.finish() == ""
    assert detokenizer.stopped


def test_special_tokens_and_numpy_ids(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|user|>a<think>b<|end|>").ids
    assert isinstance(ids, np.ndarray)
    assert IncrementalDetokenizer(byte_level, [""]).push(ids) == "a<think>b"
