"""Incremental detokenization: token ids to text as they arrive, in whole characters and without stop words."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import Protocol

from irminsul_backend.text.stop_words import StopWordMatcher
from irminsul_backend.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns one sequence's ids into text, in any number of pushes.

    The pieces it returns, joined, do not depend on how the ids were split into pushes. They are the decoded text, up to
    the first place where a stop word is complete, without that word. A character whose bytes are spread over several
    tokens is returned once it is whole, and text that may begin a stop word once it no longer can.
    """

    def __init__(self, tokenizer: Tokenizer, stop_words: Iterable[str] = ()) -> None:
        self._decoder = _decoder_for(tokenizer)
        self._matcher = StopWordMatcher(stop_words)

    @property
    def stopped(self) -> bool:
        """Whether a stop word was met; all later pushes return nothing."""
        return self._matcher.stopped

    def push(self, ids: Sequence[int]) -> str:
        """Decode the next ids; returns the text that can no longer change."""
        return self._matcher.push("".join([self._decoder.step(int(token)) for token in ids]))

    def finish(self) -> str:
        """Return the text held back, with incomplete characters as U+FFFD. Nothing may be pushed afterwards."""
        return self._matcher.push(self._decoder.finish()) + self._matcher.finish()


_MAX_PENDING = 16
"""Tokens after which invalid text is returned; a character has at most four bytes, so no valid one waits that long."""


class _Decoder(Protocol):
    def step(self, token: int) -> str: ...

    def finish(self) -> str: ...


class _ByteDecoder:
    """Decoder for byte-level tokenizers, exact: decodes the bytes of all tokens as one UTF-8 stream."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowDecoder:
    """Decoder for any other tokenizer: decodes a window of the last tokens and returns what each token adds to it.

    The window starts where the text was complete, so that markers of word starts are decoded correctly.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._seen = 0
        """Number of leading tokens of the window whose text has been returned."""

    def step(self, token: int) -> str:
        self._window.append(token)
        new = self._new_text()
        pending = len(self._window) - self._seen
        if not new or (new.endswith("\ufffd") and pending < _MAX_PENDING):
            return ""
        self._window = self._window[self._seen :]
        self._seen = len(self._window)
        return new

    def finish(self) -> str:
        return self._new_text()

    def _new_text(self) -> str:
        returned = self._tokenizer.decode(self._window[: self._seen])
        return self._tokenizer.decode(self._window)[len(returned) :]


def _decoder_for(tokenizer: Tokenizer) -> _Decoder:
    return _ByteDecoder(tokenizer) if tokenizer.is_byte_level else _WindowDecoder(tokenizer)
