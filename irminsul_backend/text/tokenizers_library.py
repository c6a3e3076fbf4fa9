"""The library for tokenizer.json, on the `tokenizers` package."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.json_files import read_text
from irminsul_backend.hub.tokenizer_files import FLAGS, added_tokens
from irminsul_backend.text.library import AddedText, TooManyTokensError
from irminsul_backend.text.splitting import AddedTokenSplitter
from irminsul_backend.text.token_bound import keeps_all_bytes

FILE_NAME = "tokenizer.json"


class TokenizersLibrary:
    """The tokenizer of a tokenizer.json, plus the added tokens that only tokenizer_config.json names."""

    file_name = FILE_NAME

    def __init__(self, definition: str, config: dict[str, Any]) -> None:
        """Build from the text of tokenizer.json and the object of tokenizer_config.json.

        Raises:
            UnsupportedModelError: tokenizer_config.json gives a token an id that it cannot have.
            Exception: the definition is not understood; the package raises no narrower one.
        """
        self._library = tokenizers.Tokenizer.from_str(definition)
        self._library.no_truncation()
        self._library.no_padding()
        parsed = json.loads(self._library.to_str() if self._add_missing(config) else definition)
        self.vocab_size = max(self._library.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = self._library.get_added_tokens_decoder()
        self.added = {i: AddedText(token.content, token.special) for i, token in added.items()}
        self.splitter = AddedTokenSplitter.of_definition(parsed)
        self.is_byte_level = (parsed.get("decoder") or {}).get("type") == "ByteLevel"
        self.bos_ids: Sequence[int] = self._prefix()
        self._keeps_all_bytes = self.is_byte_level and keeps_all_bytes(parsed)
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: Path, config: dict[str, Any]) -> TokenizersLibrary:
        """Read tokenizer.json; raises UnsupportedModelError naming it if it is missing or not understood."""
        definition = read_text(folder / FILE_NAME, "it defines the tokenizer")
        try:
            return cls(definition, config)
        except UnsupportedModelError:
            raise
        except Exception as error:  # the package raises plain Exception
            raise UnsupportedModelError(f"{folder / FILE_NAME} is not understood: {error}") from error

    def vocabulary(self) -> Iterable[bytes] | None:
        if not self._keeps_all_bytes:
            return None
        tokens = self._library.get_vocab(with_added_tokens=False)
        return [*map(_byte_level_bytes, tokens), *(token.content.encode() for token in self.added.values())]

    def encode_pieces(self, pieces: Sequence[str], most: int | None = None) -> list[NDArray[np.int32]]:
        encodings = self._library.encode_batch_fast(pieces, add_special_tokens=False)
        # The package tokenises beside other threads, but half a million ids keep them waiting while they are copied.
        if most is not None and (count := sum(map(len, encodings))) > most:
            raise TooManyTokensError(count)
        return [np.array(encoding.ids, dtype=np.int32) for encoding in encodings]

    def decode(self, ids: Sequence[int]) -> str:
        return self._library.decode(ids, skip_special_tokens=True)

    def token_id(self, text: str) -> int | None:
        return self._library.token_to_id(text)

    def token_bytes(self, token: int) -> bytes:
        data = self._token_bytes.get(token)
        if data is None:
            special = token in self.added and self.added[token].special
            text = None if special else self._library.id_to_token(token)
            data = b"" if text is None else _byte_level_bytes(text)
            self._token_bytes[token] = data
        return data

    def _add_missing(self, config: dict[str, Any]) -> bool:
        """Add the tokens that only tokenizer_config.json has, or has differently, as the hub does; True if any."""
        known = {token.content: repr(token) for token in self._library.get_added_tokens_decoder().values()}
        listed = {i: tokenizers.AddedToken(**_flags(entry)) for i, entry in added_tokens(config).items()}
        missing = {i: token for i, token in sorted(listed.items()) if known.get(token.content) != repr(token)}
        self._library.add_tokens(list(missing.values()))
        for i, token in missing.items():
            if (found := self._library.token_to_id(token.content)) != i:
                raise UnsupportedModelError(
                    f"added_tokens_decoder in tokenizer_config.json gives {token.content!r} the id {i}, but with "
                    f"{FILE_NAME} it has {found}; the two files are of different models"
                )
        return bool(missing)

    def _prefix(self) -> list[int]:
        """Return the ids that the post-processor prepends to a text."""
        alone = self._library.encode("a", add_special_tokens=False).ids
        whole = self._library.encode("a", add_special_tokens=True).ids
        starts = [i for i in range(len(whole)) if whole[i : i + len(alone)] == alone]
        return whole[: starts[0]] if alone and starts else []


def _flags(entry: dict[str, Any]) -> dict[str, Any]:
    return {name: entry[name] for name in ("content", *FLAGS) if name in entry}


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of each character of byte-level tokenizers: printable Latin-1, then the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTES = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    """Return a token's bytes; a token that is not in the byte alphabet (an added one) is its own UTF-8."""
    values = [_BYTES.get(char) for char in token]
    return token.encode() if None in values else bytes(v for v in values if v is not None)
