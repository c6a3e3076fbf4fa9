"""The stop word that is complete first, whatever their number and however the text arrives."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from irminsul_backend.text.stop_words import StopWordMatcher

WORDS = st.lists(st.text("ab", min_size=1, max_size=6), max_size=12)


def by_search(text: str, words: Sequence[str]) -> tuple[str, bool]:
    """What is left of a whole text, and whether a word stopped it; each word is looked for by itself."""
    found = [(at + len(word), at) for word in words if (at := text.find(word)) >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


def could_stop(text: str, words: Sequence[str]) -> int:
    """Length of the longest suffix that is a proper prefix of a word."""
    return max(
        (n for word in words for n in range(1, len(word)) if text.endswith(word[:n])),
        default=0,
    )


@settings(max_examples=500, deadline=None)
@given(WORDS, st.lists(st.text("abc", max_size=9), max_size=9))
def test_each_push_returns_what_is_certain(words: list[str], pieces: list[str]) -> None:
    matcher = StopWordMatcher(words)
    returned, text = "", ""
    for piece in pieces:
        returned += matcher.push(piece)
        text += piece
        expected, stopped = by_search(text, words)
        assert matcher.stopped == stopped
        assert returned == (expected if stopped else text[: len(text) - could_stop(text, words)])
        if stopped:
            assert matcher.push("ab") == matcher.finish() == ""
            return
    assert returned + matcher.finish() == text


@pytest.mark.parametrize(
    ("words", "text", "left"),
    [
        (["abc", "c"], "xabc", "x"),
        (["abcd", "bc"], "xabcd", "xa"),
        (["a", "aa", "aaa"], "baaa", "b"),
        (["aab"], "aaaab", "aa"),
        (["", "z"], "yz", "y"),
        ([], "any", "any"),
        (["é\n🙂"], "né\n🙂", "n"),
        (["\U0001f642", "\uffff"], "a\uffffb", "a"),
    ],
)
def test_the_word_that_is_complete_first(words: list[str], text: str, left: str) -> None:
    for size in range(1, len(text) + 1):
        matcher = StopWordMatcher(words)
        got = "".join(matcher.push(text[i : i + size]) for i in range(0, len(text), size)) + matcher.finish()
        assert got == left


def test_words_made_to_be_slow_are_found() -> None:
    """Nested and periodic words and a text that nearly completes each: every place is tried."""
    words = ["a" * n + "b" for n in range(900, 1024)] + ["b" + "a" * n + "c" for n in range(900, 1024)]
    text = ("a" * 899 + "b") * 3 + "a" * 1000 + "c"
    matcher = StopWordMatcher(words)
    got = "".join(matcher.push(text[i : i + 3]) for i in range(0, len(text), 3)) + matcher.finish()
    assert (got, matcher.stopped) == by_search(text, words)
