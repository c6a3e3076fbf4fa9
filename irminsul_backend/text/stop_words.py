"""Finds the first stop word in a text that arrives in pieces, at a cost that hardly depends on the number of words."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class StopWordMatcher:
    """Passes a text on, up to the stop word that is complete first; of several that end together, the longest.

    What it finds is what the Aho-Corasick automaton of the words finds. Its state is the longest suffix of the text
    that begins a word; the start of that suffix only moves forward, so that each character costs two binary searches on
    average. Sorted words take the place of the automaton's nodes, of which 256 words of 1,024 characters would have
    262,144 to be built for each request.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._words = sorted({word for word in words if word})
        self._backwards = sorted(word[::-1] for word in self._words)
        self._inner = _longest_inner_prefixes(self._backwards)
        self._first = {word[0] for word in self._words}
        self._last = {word[-1] for word in self._words}
        self._held = ""
        """The longest suffix of the text so far that is a proper prefix of a word; it is not passed on yet."""
        self.stopped = False
        """Whether a word is complete; nothing is passed on afterwards."""

    def push(self, new: str) -> str:
        """Add `new` to the text; returns what is certain not to belong to a stop word."""
        if self.stopped:
            return ""
        text, start = self._held + new, 0
        for end in range(len(self._held) + 1, len(text) + 1):
            if start == end - 1 and text[start] not in self._first:
                start = end
                continue
            while start < end and not self._begins_a_word(text[start:end]):
                start += 1
            if text[end - 1] in self._last and (length := self._word_at_the_end(text[start:end])):
                self._held, self.stopped = "", True
                return text[: end - length]
        self._held = text[start:]
        return text[:start]

    def finish(self) -> str:
        """Return what was held back: the text has ended, and no word is complete any more."""
        held, self._held = self._held, ""
        return held

    def _begins_a_word(self, text: str) -> bool:
        at = bisect_left(self._words, text)
        return at < len(self._words) and self._words[at].startswith(text)

    def _word_at_the_end(self, text: str) -> int:
        """Return the length of the longest word that `text` ends with, or 0."""
        backwards = text[::-1]
        # Whatever lies, in order, between a prefix of a text and the text begins with that prefix: the prefixes of
        # `backwards` among the words are the word before it and that word's own prefixes.
        at = bisect_right(self._backwards, backwards) - 1
        while at >= 0 and not backwards.startswith(self._backwards[at]):
            at = self._inner[at]
        return len(self._backwards[at]) if at >= 0 else 0


def _longest_inner_prefixes(words: list[str]) -> list[int]:
    """Return, for each of the sorted words, the index of the longest other word that it begins with, or -1."""
    found: list[int] = []
    chain: list[int] = []
    for index, word in enumerate(words):
        while chain and not word.startswith(words[chain[-1]]):
            chain.pop()
        found.append(chain[-1] if chain else -1)
        chain.append(index)
    return found
