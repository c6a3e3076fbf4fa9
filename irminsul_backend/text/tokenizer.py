"""Text to token ids with a memory, and back, for a model's tokenizer.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.text.folder import read_optional_json, read_text, token_text
from irminsul_backend.text.memo import SegmentMemo
from irminsul_backend.text.splitting import AddedTokenSplitter

MEMO_BYTES = 1 << 26
"""Default bound of the memory of tokenised pieces: about 60 different prompts of 100k tokens."""


class Encoded(NamedTuple):
    """A tokenised text."""

    ids: np.ndarray
    """int32 [n]."""
    edges: np.ndarray
    """int32 [k], ascending offsets in `ids` where an added (template) token stands."""


class Tokenizer:
    """A model's tokenizer that does not tokenise the same piece of text twice.

    A text is split where added tokens stand (that is what the library does first, too), and each piece between two of
    them is looked up by content. The ids are always those of the library for the whole text; a tokenizer whose pieces
    would depend on their surroundings is not split.

    Added tokens are recognised wherever they stand, so a user who writes one into a message gets that token: the
    template's text is tokenised as a whole, as published servers do it. A gateway that must prevent this has to
    refuse such text before it comes here.
    """

    def __init__(self, definition: str, config: dict[str, Any], end_ids: Iterable[int], memo_bytes: int = MEMO_BYTES):
        """Build from the text of tokenizer.json and the object of tokenizer_config.json."""
        self._library = tokenizers.Tokenizer.from_str(definition)
        self._library.no_truncation()
        self._library.no_padding()
        self._memo = SegmentMemo(memo_bytes)
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        """The highest id plus one."""
        added = self._library.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._token_bytes: dict[int, bytes] = {}
        parsed = json.loads(definition)
        self._splitter = AddedTokenSplitter(parsed)
        self._singles = {text: np.array([self.token_id(text)], np.int32) for text in self._splitter.tokens}
        self.is_byte_level = (parsed.get("decoder") or {}).get("type") == "ByteLevel"
        """Whether a token is a string of bytes, whatever stands beside it."""
        self._is_edge = np.zeros(self.vocab_size + 1, dtype=bool)
        self._is_edge[[i for i, token in added.items() if token.content.strip()]] = True
        self.bos_ids = self._find_bos(config)
        """What stands in front of a plain text that is completed; a chat template writes its own."""
        eos = self.token_id(token_text(config.get("eos_token")) or "")
        self.end_ids = tuple(sorted({*end_ids, *(() if eos is None else (eos,))}))
        """Ids after which the model ends its turn, from every file that names some."""

    @classmethod
    def load(cls, folder: str | Path, memo_bytes: int = MEMO_BYTES) -> Tokenizer:
        """Read tokenizer.json, and tokenizer_config.json, generation_config.json and config.json where they exist.

        Raises:
            UnsupportedModelError: tokenizer.json is missing or not understood; the message names the file.
        """
        folder = Path(folder)
        definition = read_text(folder / "tokenizer.json", "it defines the tokenizer")
        config = read_optional_json(folder / "tokenizer_config.json")
        end_ids: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            value = read_optional_json(folder / name).get("eos_token_id")
            end_ids.update(value if isinstance(value, list) else [] if value is None else [value])
        try:
            return cls(definition, config, end_ids, memo_bytes)
        except Exception as error:  # the library raises plain Exception
            raise UnsupportedModelError(f"{folder / 'tokenizer.json'} is not understood: {error}") from error

    def encode(self, text: str, *, add_bos: bool = False) -> Encoded:
        """Tokenise; the ids are those of the library's encode of the whole text without special tokens added.

        Args:
            text: no lone surrogates.
            add_bos: put `bos_ids` in front, unless the text itself begins with them.
        """
        pieces = self._splitter.split(text)
        found: dict[str, np.ndarray] = {}
        missing: list[str] = []
        for piece in dict.fromkeys(pieces):
            ids = self._singles.get(piece)
            ids = self._memo.get(piece) if ids is None else ids
            if ids is None:
                missing.append(piece)
            else:
                found[piece] = ids
        encodings = self._library.encode_batch_fast(missing, add_special_tokens=False)
        for piece, encoding in zip(missing, encodings, strict=True):
            found[piece] = np.array(encoding.ids, dtype=np.int32)
            self._memo.put(piece, found[piece])
        parts = [found[piece] for piece in pieces]
        if add_bos and len(self.bos_ids) and not (parts and self._starts_with_bos(parts[0])):
            parts.insert(0, self.bos_ids)
        ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
        return Encoded(ids, self.edges(ids))

    def edges(self, ids: np.ndarray) -> np.ndarray:
        """Offsets where an added token stands that is not only space. int32 [n] -> int32 [k]."""
        return np.flatnonzero(self._is_edge.take(ids, mode="clip")).astype(np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Text of `ids`; special tokens are left out, bytes that are not UTF-8 become U+FFFD."""
        return self._library.decode([int(i) for i in ids], skip_special_tokens=True)

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written `text`, or None."""
        return self._library.token_to_id(text)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is written `text`, or None; such a token never shows in decoded text."""
        token = self.token_id(text)
        return token if token in self._special_ids else None

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to the output; only for `is_byte_level` tokenizers. Special ones add none."""
        data = self._token_bytes.get(token)
        if data is None:
            text = None if token in self._special_ids else self._library.id_to_token(token)
            data = b"" if text is None else _byte_level_bytes(text)
            self._token_bytes[token] = data
        return data

    def _starts_with_bos(self, first: np.ndarray) -> bool:
        return len(first) >= len(self.bos_ids) and bool((first[: len(self.bos_ids)] == self.bos_ids).all())

    def _find_bos(self, config: dict[str, Any]) -> np.ndarray:
        """tokenizer_config's add_bos_token decides; without it, the post-processor of tokenizer.json."""
        wanted = config.get("add_bos_token")
        if wanted is None:
            alone = self._library.encode("a", add_special_tokens=False).ids
            whole = self._library.encode("a", add_special_tokens=True).ids
            starts = [i for i in range(len(whole)) if whole[i : i + len(alone)] == alone]
            return np.array(whole[: starts[0]] if alone and starts else [], np.int32)
        bos = self.token_id(token_text(config.get("bos_token")) or "")
        return np.array([bos] if wanted and bos is not None else [], np.int32)


def _byte_alphabet() -> dict[str, int]:
    """How byte-level tokenizers write bytes: printable Latin-1 as itself, the rest from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """A token's bytes; one that is not written in the byte alphabet (an added token) is its own UTF-8."""
    values = [_BYTES.get(char) for char in token]
    return token.encode() if None in values else bytes(v for v in values if v is not None)
