"""The files that define a tokenizer: what tokenizer_config.json says of tokens, end ids, tiktoken.model."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.json_files import read_optional_json, shown

END_ID_FILES = ("generation_config.json", "config.json")
"""Files whose eos_token_id ends a turn."""
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that tokenizer_config.json may name, and by whose names chat templates ask for them."""
MAX_ID = 1_000_000
"""Largest id of an added token: every id below it takes room, and published vocabularies have some hundred thousand."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Flags of an added token, each true, false or missing."""


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read `folder`/tokenizer_config.json, or nothing where it is missing.

    Raises:
        UnsupportedModelError: the file, or what it says of tokens, is not understood; names the file.
    """
    path = folder / "tokenizer_config.json"
    config = read_optional_json(path)
    try:
        added_tokens(config)
        named_tokens(config)
    except UnsupportedModelError as error:
        raise UnsupportedModelError(f"{path} is not understood: {error}") from error
    return config


def read_end_ids(folder: Path) -> list[int]:
    """Read the ids that end a turn, from each of END_ID_FILES that names some: a number, a list of them, or null.

    Raises:
        UnsupportedModelError: a file holds something else; names the file.
    """
    found: list[int] = []
    for path in (folder / name for name in END_ID_FILES):
        value = read_optional_json(path).get("eos_token_id")
        ids = value if isinstance(value, list) else [] if value is None else [value]
        for i in ids:
            if not isinstance(i, int) or isinstance(i, bool) or not 0 <= i < 2**31:
                raise UnsupportedModelError(
                    f"eos_token_id in {path} is {shown(value)}; it must be an id, a list of ids or null "
                    "(ids are 0 to 2**31 - 1)"
                )
        found += ids
    return found


def read_ranks(path: Path) -> dict[bytes, int]:
    """Read tiktoken.model: lines of "base64-of-a-token rank".

    Raises:
        UnsupportedModelError: the file cannot be read, or a line is something else (its number is given).
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise UnsupportedModelError(f"it cannot be read: {error}") from error
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise UnsupportedModelError(
                f'line {number} is {line[:60].decode("utf-8", "replace")!r}; it must be "base64 rank"'
            ) from error
    return ranks


def token_text(value: Any) -> str | None:
    """Return the text of a special token in tokenizer_config.json: a string, an object with "content", or None."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens that tokenizer_config.json names, by name."""
    return {name: text for name in SPECIAL_NAMES if (text := token_text(config.get(name)))}


def added_tokens(config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """Return added_tokens_decoder of tokenizer_config.json: objects with "content" and flags, by id.

    Raises:
        UnsupportedModelError: a key is not an id, or an entry has no content or a flag that is not true or false.
    """
    entries = {}
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise UnsupportedModelError(
            f"added_tokens_decoder in tokenizer_config.json is {shown(decoder)}; it must be an object"
        )
    for key, entry in decoder.items():
        if not key.isdecimal() or not isinstance(entry, dict) or not token_text(entry):
            raise UnsupportedModelError(
                f"added_tokens_decoder in tokenizer_config.json has {key[:60]!r}: {shown(entry)}; "
                'it must map ids to objects with a "content"'
            )
        if len(key) > len(str(MAX_ID)) or int(key) > MAX_ID:
            raise UnsupportedModelError(
                f"added_tokens_decoder in tokenizer_config.json has the id {key[:60]}; it must be at most {MAX_ID:,}"
            )
        for flag in FLAGS:
            if flag in entry and not isinstance(entry[flag], bool):
                raise UnsupportedModelError(
                    f"added_tokens_decoder in tokenizer_config.json gives token {key} {flag} = {shown(entry[flag])}; "
                    "it must be true or false"
                )
        entries[int(key)] = entry
    return entries


def named_tokens(config: dict[str, Any]) -> list[str]:
    """Return every text that tokenizer_config.json calls special, by name or in a list of further ones, each once.

    Raises:
        UnsupportedModelError: the further ones are neither a list nor an object.
    """
    name = "additional_special_tokens" if config.get("additional_special_tokens") else "extra_special_tokens"
    further = config.get(name) or []
    if not isinstance(further, (dict, list)):
        raise UnsupportedModelError(f"{name} in tokenizer_config.json is {shown(further)}; it must be a list")
    values = further.values() if isinstance(further, dict) else further
    texts = [text for value in values if (text := token_text(value))]
    return list(dict.fromkeys([*special_tokens(config).values(), *texts]))
