"""Reading the JSON files of a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.json_file import parse_json, shown

MAX_ID = 1_000_000
"""Of an added token: every id below it takes room, and published vocabularies have some hundred thousand."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
"""Of an added token, each true, false or missing."""


def read_text(path: Path, what: str) -> str:
    """The file's text; raises UnsupportedModelError naming the file if it is missing or not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnsupportedModelError(
            f"{path} is missing: {what}; give the folder of a complete Hugging Face model"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from error


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The file's JSON object; raises UnsupportedModelError naming the file if it is missing or something else."""
    text = read_text(path, what)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """As `read_json`, but a missing file reads as an empty object."""
    return read_json(path, "") if path.exists() else {}


def token_text(value: Any) -> str | None:
    """The text of a special token in tokenizer_config.json: a string, an object with "content", or None."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens that tokenizer_config.json may name, and by whose names chat templates ask for them."""


def special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The texts of the special tokens that tokenizer_config.json names, by name."""
    return {name: text for name in SPECIAL_NAMES if (text := token_text(config.get(name)))}


def added_tokens(config: dict[str, Any]) -> dict[int, dict[str, Any]]:
    """added_tokens_decoder of tokenizer_config.json: objects with "content" and flags by id.

    Raises UnsupportedModelError: a key is not an id, or an entry has no content or a flag that is no boolean.
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


def named_tokens(config: dict[str, Any]) -> Iterator[str]:
    """Every text that tokenizer_config.json calls special by name or in a list of further ones, each once.

    Raises UnsupportedModelError: the further ones are neither a list nor an object.
    """
    name = "additional_special_tokens" if config.get("additional_special_tokens") else "extra_special_tokens"
    further = config.get(name) or []
    if not isinstance(further, (dict, list)):
        raise UnsupportedModelError(f"{name} in tokenizer_config.json is {shown(further)}; it must be a list")
    values = further.values() if isinstance(further, dict) else further
    yield from dict.fromkeys(
        [*special_tokens(config).values(), *(text for value in values if (text := token_text(value)))]
    )
