"""The library for tiktoken.model, which Kimi-K2 and Moonlight ship, on the `tiktoken` package."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.tokenizer_files import added_tokens, named_tokens, read_ranks
from irminsul_backend.text.library import AddedText, TooManyTokensError
from irminsul_backend.text.splitting import AddedTokenSplitter

FILE_NAME = "tiktoken.model"
RESERVED = 256
"""Number of ids after the base vocabulary that are special, whether or not tokenizer_config.json names them."""
LONGEST_RUN = 25_000
"""Longest run of spaces, or of other characters, that is tokenised at once (as the published tokenizers do). On a few
hundred thousand spaces the package's regular expressions overflow the stack."""

_HAN = r"\p{Han}"
_CAPITALS = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]"
_SMALLS = rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^{_HAN}]]"
_BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
WORDS = "|".join(
    (
        rf"[{_HAN}]+",
        f"{_BEFORE_WORD}{_CAPITALS}*{_SMALLS}+{_CONTRACTION}",
        f"{_BEFORE_WORD}{_CAPITALS}+{_SMALLS}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)
"""Pattern by which Kimi and Moonlight split a text before merging (`pat_str` of the published TikTokenTokenizer):
o200k's rule with runs of Han characters separate."""

_LONG_RUN = re.compile(rf"(?<!\s)\s{{{LONGEST_RUN + 1},}}|(?<!\S)\S{{{LONGEST_RUN + 1},}}")
"""Runs longer than LONGEST_RUN. Matched at their start only, or the time would grow with the square of their length."""


class TiktokenLibrary:
    """Byte-pair encoding by rank, with special tokens after the base vocabulary.

    Text that spells a special token becomes that token, as with tokenizer.json. Of two that start at the same place the
    longer one is taken (the package's own choice is unspecified).
    """

    file_name = FILE_NAME
    is_byte_level = True
    bos_ids: Sequence[int] = ()

    def __init__(self, ranks: dict[bytes, int], config: dict[str, Any]) -> None:
        """Build from the ranks of tiktoken.model and the object of tokenizer_config.json.

        Raises:
            UnsupportedModelError: the package is missing; ranks or special tokens are not understood.
        """
        try:
            import tiktoken
        except ImportError as error:
            raise UnsupportedModelError(
                f"the model's tokenizer is a {FILE_NAME}, which needs the package tiktoken: pip install tiktoken"
            ) from error
        kind = config.get("tokenizer_class", "TikTokenTokenizer")
        if kind != "TikTokenTokenizer":
            raise UnsupportedModelError(
                f"tokenizer_class in tokenizer_config.json is {kind!r}; how it splits text is not known. Of those with "
                f"a {FILE_NAME} TikTokenTokenizer (Kimi, Moonlight) is understood"
            )
        _check_ranks(ranks)
        self._ranks = ranks
        self.added = _special_tokens(len(ranks), config)
        self.vocab_size = len(ranks) + len(self.added)
        self._special = {token.content: i for i, token in self.added.items()}
        self._bytes = {rank: token for token, rank in ranks.items()}
        self._bytes |= {i: token.content.encode() for i, token in self.added.items() if not token.special}
        self.splitter = AddedTokenSplitter([list(self._special)])
        # special tokens are found by the splitter, which does not depend on the order in which they are given
        self._encoding = tiktoken.Encoding(FILE_NAME, pat_str=WORDS, mergeable_ranks=ranks, special_tokens={})

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> TiktokenLibrary:
        """Read tiktoken.model; raises UnsupportedModelError naming the file, and the line where there is one."""
        path = folder / FILE_NAME
        try:
            return cls(read_ranks(path), config)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"{path}: {error}") from error

    def vocabulary(self) -> Iterable[bytes]:
        return [*self._ranks, *(token.content.encode() for token in self.added.values())]

    def encode_pieces(self, pieces: Sequence[str], most: int | None = None) -> list[NDArray[np.int32]]:
        found: list[NDArray[np.int32]] = []
        count = 0
        for piece in pieces:
            found.append(self._encode(piece))
            count += len(found[-1])
            if most is not None and count > most:
                raise TooManyTokensError(count)
        return found

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_id(self, text: str) -> int | None:
        special = self._special.get(text)
        return self._ranks.get(text.encode()) if special is None else special

    def token_bytes(self, token: int) -> bytes:
        return self._bytes.get(token, b"")

    def _encode(self, text: str) -> NDArray[np.int32]:
        parts = []
        for piece in self.splitter.split(text):
            if piece in self._special:
                parts.append(np.array([self._special[piece]], np.uint32))
            else:
                parts += [self._encoding.encode_to_numpy(run, disallowed_special=()) for run in _short_runs(piece)]
        return np.concatenate(parts).astype(np.int32) if parts else np.empty(0, np.int32)


def _check_ranks(ranks: dict[bytes, int]) -> None:
    lacking = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if lacking:
        raise UnsupportedModelError(
            f"{len(lacking)} of the 256 single bytes have no token, the first is {lacking[0]:#04x}; is the file whole?"
        )
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise UnsupportedModelError(
            f"the ranks of its {len(ranks)} tokens are not 0 to {len(ranks) - 1}, each once; is the file whole?"
        )


def _special_tokens(base: int, config: dict[str, Any]) -> dict[int, AddedText]:
    """Return the special tokens, by id from `base` on: named by added_tokens_decoder, or else by their id."""
    named = added_tokens(config)
    always = set(named_tokens(config))
    below = sorted(i for i in named if i < base)
    if below:
        raise UnsupportedModelError(
            f"added_tokens_decoder in tokenizer_config.json names id {below[0]} ({named[below[0]]['content']!r}), "
            f"but special tokens begin at {base}, the number of tokens here; the two files are of different models"
        )
    out: dict[int, AddedText] = {}
    for i in range(base, max([base + RESERVED, *(i + 1 for i in named)])):
        entry = named.get(i, {"content": f"<|reserved_token_{i}|>", "special": True})
        content = entry["content"]
        out[i] = AddedText(content, bool(entry.get("special", False)) or content in always)
    contents = [token.content for token in out.values()]
    if len(set(contents)) < len(contents) or "" in contents:
        raise UnsupportedModelError("added_tokens_decoder in tokenizer_config.json has an empty or a repeated content")
    return out


def _short_runs(text: str) -> Iterator[str]:
    """Yield the text with runs of spaces, and of other characters, cut after LONGEST_RUN."""
    start = 0
    for match in _LONG_RUN.finditer(text):
        for cut in range(match.start() + LONGEST_RUN, match.end(), LONGEST_RUN):
            yield text[start:cut]
            start = cut
    yield text[start:]
