"""The tokenizer that a model ships, with a cache of tokenised text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.hub.tokenizer_files import read_end_ids, read_tokenizer_config, token_text
from irminsul_backend.text import tiktoken_library, tokenizers_library
from irminsul_backend.text.client_text import client_spans, plain
from irminsul_backend.text.library import AddedText, Library
from irminsul_backend.text.memo import SegmentMemo
from irminsul_backend.text.splitting import ControlTokenGuard
from irminsul_backend.text.token_bound import byte_weights, least_tokens

MEMO_BYTES = 1 << 26
"""Default size of the cache of tokenised pieces, in bytes: about 60 different prompts of 100k tokens."""


class Encoded(NamedTuple):
    """A tokenised text."""

    ids: NDArray[np.int32]
    """int32 [n]."""
    edges: NDArray[np.int32]
    """int32 [k], ascending offsets in `ids` of added (template) tokens that are not only space."""


class Tokenizer:
    """A model's tokenizer that does not tokenise the same piece of text twice.

    A text is split at added tokens (as the library itself does first), and each piece between two of them is looked up
    in the cache. The ids are always those of the library for the whole text; where they would depend on what surrounds
    a piece, texts are not split.

    Added tokens are recognised anywhere in a plain str. In a `ClientText` no control token is made of characters that
    the client sent: what is written like one is tokenised as text. Control tokens are the special ones and those that
    are written like a tag, `<…>` or `[…]`: models use some of these for roles without calling them special.
    """

    def __init__(
        self, library: Library, config: dict[str, Any], end_ids: Iterable[int] = (), memo_bytes: int = MEMO_BYTES
    ) -> None:
        """config: the object of tokenizer_config.json. end_ids: end-of-turn ids that other files give."""
        self._library = library
        self._memo = SegmentMemo(memo_bytes)
        self.file_name = library.file_name
        """Name of the file that defines the tokenizer."""
        self.vocab_size = library.vocab_size
        """The highest id plus one."""
        self.is_byte_level = library.is_byte_level
        """Whether every token decodes to fixed bytes, whatever its neighbours are."""
        self._singles = {text: np.array([self.token_id(text)], np.int32) for text in library.splitter.tokens}
        self._is_edge = np.zeros(self.vocab_size + 1, dtype=bool)
        self._is_edge[[i for i, token in library.added.items() if token.content.strip()]] = True
        control = {i: token.content for i, token in library.added.items() if _is_control(token)}
        self._guard = ControlTokenGuard(control.values())
        self._is_control = np.zeros(self.vocab_size + 1, dtype=bool)
        self._is_control[list(control)] = True
        self.bos_ids = self._find_bos(config)
        """Ids prepended to a plain-text prompt, int32 [0 or more]; a chat template writes its own."""
        eos = self.token_id(token_text(config.get("eos_token")) or "")
        self.end_ids = tuple(sorted({*end_ids, *(() if eos is None else (eos,))}))
        """Ids after which the model ends its turn, from every file that names some."""

    @classmethod
    def load(cls, folder: str | Path, memo_bytes: int = MEMO_BYTES) -> Tokenizer:
        """Read tokenizer.json, or tiktoken.model where there is no such file, and the settings beside it.

        The settings are in tokenizer_config.json, generation_config.json and config.json, each where it exists.

        Raises:
            UnsupportedModelError: a file is missing or not understood; the message names it.
        """
        folder = Path(folder)
        config, end_ids = read_tokenizer_config(folder), read_end_ids(folder)
        tiktoken = (folder / tiktoken_library.FILE_NAME).exists() and not (
            folder / tokenizers_library.FILE_NAME
        ).exists()
        kind = tiktoken_library.TiktokenLibrary if tiktoken else tokenizers_library.TokenizersLibrary
        return cls(kind.load(folder, config), config, end_ids, memo_bytes)

    def encode(self, text: str, *, add_bos: bool = False, most: int | None = None) -> Encoded:
        """Tokenise; the ids are those of the library's encode of the whole text without special tokens added.

        Args:
            text: no lone surrogates.
            add_bos: prepend `bos_ids`, unless the text itself begins with them.
            most: tokens that the caller has room for; a text that has more may be given up early.

        Raises:
            TooManyTokensError: the text has more than `most` tokens; not raised for all such texts.
            InvalidRequestError: a client's text cannot be kept from being read as a control token.
        """
        sections, allowed = self._guard.sections(plain(text), client_spans(text))
        pieces = [piece for section in sections for piece in self._library.splitter.split(section)]
        found: dict[str, NDArray[np.int32]] = {}
        missing: list[str] = []
        for piece in dict.fromkeys(pieces):
            ids = self._singles.get(piece)
            ids = self._memo.get(piece) if ids is None else ids
            if ids is None:
                missing.append(piece)
            else:
                found[piece] = ids
        for piece, ids in zip(missing, self._library.encode_pieces(missing, most), strict=True):
            found[piece] = ids
            self._memo.put(piece, ids)
        parts = [found[piece] for piece in pieces]
        ids = np.concatenate(parts) if parts else np.empty(0, np.int32)
        if client_spans(text) and np.count_nonzero(self._is_control.take(ids, mode="clip")) > allowed:
            # A normalizer can turn other characters into those of a token.
            raise InvalidRequestError(
                "the prompt holds text that this model's tokenizer reads as a control token however it is cut; "
                "leave it out, or allow it with allow_special_tokens"
            )
        if add_bos and not np.array_equal(ids[: len(self.bos_ids)], self.bos_ids):
            ids = np.concatenate((self.bos_ids, ids))
        return Encoded(ids, self.edges(ids))

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that `text` (no lone surrogates) has at least; 0 where nothing can be told."""
        return least_tokens(text.encode(), self._byte_weights)

    @cached_property
    def _byte_weights(self) -> NDArray[np.float64]:
        return byte_weights(self._library.vocabulary() or ())

    def edges(self, ids: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the offsets of added tokens that are not only space. int32 [n] -> int32 [k]."""
        return np.flatnonzero(self._is_edge.take(ids, mode="clip")).astype(np.int32)

    def decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        """Decode `ids`; special tokens are skipped, bytes that are not UTF-8 become U+FFFD."""
        return self._library.decode([int(i) for i in ids])

    def token_id(self, text: str) -> int | None:
        """Return the id of the token written as `text`, or None."""
        return self._library.token_id(text)

    def special_id(self, text: str) -> int | None:
        """Return the id of the special token written as `text`, or None; decoded text never contains such a token."""
        token = self.token_id(text)
        added = None if token is None else self._library.added.get(token)
        return token if added is not None and added.special else None

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, none for special tokens; only for `is_byte_level` tokenizers."""
        return self._library.token_bytes(token)

    def _find_bos(self, config: dict[str, Any]) -> NDArray[np.int32]:
        """Return the BOS ids, by add_bos_token of tokenizer_config.json or else by the library's own rule."""
        wanted = config.get("add_bos_token")
        if wanted is None:
            return np.array(self._library.bos_ids, np.int32)
        bos = self.token_id(token_text(config.get("bos_token")) or "")
        return np.array([bos] if wanted and bos is not None else [], np.int32)


def _is_control(token: AddedText) -> bool:
    return token.special or (token.content.startswith(("<", "[")) and token.content.endswith((">", "]")))
