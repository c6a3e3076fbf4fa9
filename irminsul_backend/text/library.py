"""What a tokenizer needs of the library that tokenises for it, whatever file the model ships."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from irminsul_backend.text.splitting import AddedTokenSplitter


class AddedText(NamedTuple):
    """A token that stands beside the vocabulary and is found in a text before anything else."""

    content: str
    special: bool
    """Whether decoding leaves it out."""


class Library(Protocol):
    """Text to ids and back, without a memory. All methods may be called from any thread."""

    file_name: str
    """Of the file that defines the tokenizer."""
    vocab_size: int
    """The highest id plus one."""
    added: dict[int, AddedText]
    """The added tokens by id."""
    splitter: AddedTokenSplitter
    """Where a text may be cut without changing its ids."""
    is_byte_level: bool
    """Whether a token is a string of bytes, whatever stands beside it."""
    bos_ids: Sequence[int]
    """What the library itself would put in front of a text, if the model's settings do not say."""

    def encode_pieces(self, pieces: Sequence[str]) -> list[NDArray[np.int32]]:
        """The ids of each piece by itself, int32 [n]; added tokens in it are recognised, none is put around it."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens and ids without a token are left out, bytes that are not UTF-8 become U+FFFD."""
        ...

    def token_id(self, text: str) -> int | None:
        """The id of the token that is written `text`, or None."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """What a token adds to the output; only where `is_byte_level`. Special ones and unknown ids add nothing."""
        ...
