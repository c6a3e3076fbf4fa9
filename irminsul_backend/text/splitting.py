"""Splits text at added tokens, where the pieces tokenise separately as they do together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

_LOCAL_PRE_TOKENIZERS = {
    *("ByteLevel", "Split", "Digits", "Whitespace", "WhitespaceSplit", "Punctuation"),
    *("BertPreTokenizer", "UnicodeScripts", "CharDelimiterSplit"),
}
"""Pre-tokenizers that treat a piece between added tokens as they treat it alone. Metaspace is not one of them: it marks
the start of the whole text."""


class AddedTokenSplitter:
    """Splits texts at added tokens as the library itself does before anything else."""

    def __init__(self, passes: Sequence[Sequence[str]]) -> None:
        """passes: the tokens at which to split the text, those at which to split the pieces that remain, and so on."""
        self._passes = [_start_patterns(contents) for contents in passes]
        self.tokens = frozenset(content for contents in passes for content in contents)
        """The added tokens at which texts are split."""

    @classmethod
    def of_definition(cls, definition: dict[str, Any]) -> AddedTokenSplitter:
        """Make the splitter for the object of a tokenizer.json.

        The library looks for tokens that are not normalised first, in the raw text, and then for the others in each
        normalised piece. The second pass is repeated here only where normalising changes nothing. For a
        tokenizer whose added tokens affect the text around them (lstrip, rstrip, single_word), or whose pre-tokenizer
        looks beyond a piece, the splitter never splits.
        """
        added = [token for token in definition.get("added_tokens") or [] if token["content"]]
        reaching = any(token[flag] for token in added for flag in ("lstrip", "rstrip", "single_word"))
        passes: list[list[str]] = []
        if not reaching and _is_local(definition.get("pre_tokenizer")):
            passes.append([token["content"] for token in added if not token["normalized"]])
            if _is_identity(definition.get("normalizer")):
                passes.append([token["content"] for token in added if token["normalized"]])
        return cls(passes)

    def split(self, text: str) -> list[str]:
        """Split `text` into non-empty pieces, in order; a piece that is in `tokens` is that token."""
        pieces = [text] if text else []
        for patterns in self._passes:
            pieces = [
                part for piece in pieces for part in ((piece,) if piece in self.tokens else _split_at(patterns, piece))
            ]
        return pieces


class ControlTokenGuard:
    """Cuts a client's text inside whatever would be read as a control token, so that it stays text."""

    def __init__(self, contents: Iterable[str]) -> None:
        """contents: the control tokens; one of a single character cannot be cut and is left out."""
        self._patterns = _start_patterns([content for content in contents if len(content) > 1])

    def sections(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[list[str], int]:
        """Split `text` so that no section holds a control token of which a character lies in `spans`.

        Returns:
            The sections, and the number of control tokens in them.
        """
        cuts, at, tokens, span = [0], 0, 0, 0
        for start, end in _matches(self._patterns, text) if spans else ():
            if start < at:
                continue
            while span < len(spans) and spans[span][1] <= start:
                span += 1
            if span == len(spans) or spans[span][0] >= end:
                tokens, at = tokens + 1, end
                continue
            shorter = self._token_before(text, start, spans[span][0])
            tokens += shorter is not None
            at = start + 1 if shorter is None else shorter
            cuts.append(at)
        return [text[begin:end] for begin, end in zip(cuts, [*cuts[1:], len(text)], strict=True)], tokens

    def _token_before(self, text: str, start: int, limit: int) -> int | None:
        """Return the end of the longest control token from `start` on that ends by `limit`."""
        found = (pattern.match(text, start, max(start, limit)) for pattern in self._patterns)
        return next((match.end(1) for match in found if match), None)


def _matches(patterns: list[re.Pattern[str]], text: str) -> list[tuple[int, int]]:
    """Find the longest match at each place where one begins; they may overlap."""
    return sorted((m.start(), m.end(1)) for pattern in patterns for m in pattern.finditer(text))


def _split_at(patterns: list[re.Pattern[str]], text: str) -> list[str]:
    """Split at the leftmost-longest matches, without overlap."""
    pieces, done = [], 0
    for start, end in _matches(patterns, text):
        if start >= done:
            pieces += [text[done:start], text[start:end]]
            done = end
    return [piece for piece in (*pieces, text[done:]) if piece]


def _start_patterns(contents: Iterable[str]) -> list[re.Pattern[str]]:
    """Compile a pattern per first character that matches wherever a token starts; group 1 ends where the token ends.

    A pattern that begins with a literal is several times faster than one that begins with an alternation.
    """
    by_first: dict[str, list[str]] = {}
    for content in contents:
        by_first.setdefault(content[0], []).append(content[1:])
    return [re.compile(f"{re.escape(first)}(?=({_longest_of(rests)}))") for first, rests in by_first.items()]


def _longest_of(words: list[str]) -> str:
    """Return a pattern, shaped as a trie, that matches the longest of `words`."""
    by_first: dict[str, list[str]] = {}
    for word in words:
        if word:
            by_first.setdefault(word[0], []).append(word[1:])
    body = "|".join(re.escape(first) + _longest_of(rests) for first, rests in by_first.items())
    may_end = bool(body) and "" in words
    return f"(?:{body}){'?' * may_end}" if may_end or len(by_first) > 1 else body


def _is_identity(normalizer: dict[str, Any] | None) -> bool:
    return normalizer is None or (
        normalizer["type"] == "Sequence" and all(_is_identity(part) for part in normalizer["normalizers"])
    )


def _is_local(pre_tokenizer: dict[str, Any] | None) -> bool:
    if pre_tokenizer is None:
        return True
    if pre_tokenizer["type"] == "Sequence":
        return all(_is_local(part) for part in pre_tokenizer["pretokenizers"])
    return pre_tokenizer["type"] in _LOCAL_PRE_TOKENIZERS
