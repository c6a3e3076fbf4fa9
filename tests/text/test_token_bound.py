"""The bound on a text's tokens never exceeds their number, and says something about real text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_backend.config import DEMO_MODEL
from irminsul_backend.text import Tokenizer
from irminsul_backend.text.token_bound import byte_weights, least_tokens
from irminsul_backend.text.tokenizers_library import TokenizersLibrary

TEXTS = st.lists(st.sampled_from(["    ", "\n\n", "the ", "東京", "🙂", "<|end|>", "0", "é", "answer"]), max_size=60)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO_MODEL)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS.map("".join) | st.text(max_size=80))
def test_never_more_than_there_are(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text).ids)


def test_real_text(tokenizer: Tokenizer) -> None:
    text = json.dumps({"the agent reads": ["the tool's answer", 12345]}) * 50
    assert len(tokenizer.encode(text).ids) / 20 < tokenizer.least_tokens(text)


@pytest.mark.parametrize("kind", ["byte_level", "deepseek", "empty_normalizer"])
def test_kinds_that_keep_all_bytes(definitions: dict[str, Any], kind: str) -> None:
    tokenizer = Tokenizer(TokenizersLibrary(json.dumps(definitions[kind]), {}), {})
    assert 0 < tokenizer.least_tokens("some text " * 20) <= len(tokenizer.encode("some text " * 20).ids)


@pytest.mark.parametrize("kind", ["changing_normalizer", "prepending_normalizer", "metaspace", "lstrip", "rstrip"])
def test_nothing_is_told_of_others(definitions: dict[str, Any], kind: str) -> None:
    assert Tokenizer(TokenizersLibrary(json.dumps(definitions[kind]), {}), {}).least_tokens("text " * 99) == 0


def test_nothing_is_told_where_text_is_dropped(definitions: dict[str, Any]) -> None:
    split = {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False}
    definition = {**definitions["byte_level"]}
    definition["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, definition["pre_tokenizer"]]}
    assert Tokenizer(TokenizersLibrary(json.dumps(definition), {}), {}).least_tokens(" " * 99) == 0


def test_weights() -> None:
    weights = byte_weights([b"a", b"b", b"aab", b"c" * 4, b"c", b"dd"])
    assert [weights[ord(c)] for c in "abcde"] == [1 / 3, 1 / 3, 1 / 4, 0, 0]
    assert least_tokens(b"aabaab", weights) == 2
    assert least_tokens(b"aabaaba", weights) == 3
    assert least_tokens(b"", weights) == least_tokens(b"ddddd", weights) == 0
