"""The interface of the tokenizer libraries, one for each kind of tokenizer file."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from irminsul_backend.text.splitting import AddedTokenSplitter


class TooManyTokensError(Exception):
    """A text has more tokens than its caller can use."""

    def __init__(self, count: int) -> None:
        super().__init__(f"at least {count} tokens")
        self.count = count
        """Tokens that the text has at least."""


class AddedText(NamedTuple):
    """A token outside the base vocabulary that is matched in a text before anything else."""

    content: str
    special: bool
    """Whether decoding skips the token."""


class Library(Protocol):
    """Encodes and decodes text, without a cache. All methods may be called from any thread."""

    file_name: str
    """Name of the file that defines the tokenizer."""
    vocab_size: int
    """The highest id plus one."""
    added: dict[int, AddedText]
    """Added tokens by id."""
    splitter: AddedTokenSplitter
    """Splits a text where that does not change its ids."""
    is_byte_level: bool
    """Whether every token decodes to fixed bytes, whatever its neighbours are."""
    bos_ids: Sequence[int]
    """Ids that the library prepends to a text by default, where the model's settings do not decide."""

    def vocabulary(self) -> Iterable[bytes] | None:
        """Return the bytes of each token, or None where the tokens of a text need not cover all of its bytes."""
        ...

    def encode_pieces(self, pieces: Sequence[str], most: int | None = None) -> list[NDArray[np.int32]]:
        """Encode each piece alone, int32 [n]; added tokens in the text are recognised, none is added around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids; special tokens and unknown ids are skipped, bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_id(self, text: str) -> int | None:
        """Return the id of the token written as `text`, or None."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of a token, none for special tokens and unknown ids; only where `is_byte_level`."""
        ...
