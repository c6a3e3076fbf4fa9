"""The text and JSON files of a model folder, read in one place. Errors name the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from irminsul_backend.errors import UnsupportedModelError

MAX_DEPTH = 64
"""Deepest nesting of objects and lists; published files need 6. Deeper values could not be printed again."""


def read_text(path: Path, what: str) -> str:
    """Read a UTF-8 file of a model folder.

    Args:
        what: what the file is for, such as "it defines the tokenizer"; said if the file is missing.

    Raises:
        UnsupportedModelError: the file is missing or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UnsupportedModelError(
            f"{path} is missing: {what}; give the folder of a complete Hugging Face model"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error}") from error


def read_json(path: Path, what: str) -> dict[str, Any]:
    """Read a JSON object; `what` as in :func:`read_text`.

    Raises:
        UnsupportedModelError: the file is missing, not JSON, or holds something other than an object.
    """
    text = read_text(path, what)
    try:
        value = parse_json(text)
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModelError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_optional_json(path: Path) -> dict[str, Any]:
    """Like :func:`read_json`, but a missing file reads as an empty object."""
    return read_json(path, "") if path.exists() else {}


def read_config(folder: str | Path) -> dict[str, Any]:
    """Read `folder`/config.json, which every model has; raises as :func:`read_json` does."""
    return read_json(Path(folder) / "config.json", "it describes the model")


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text; raises ValueError if it is not valid, or nested deeper than MAX_DEPTH."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError(f"objects and lists are nested more than {MAX_DEPTH} deep") from None
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, (dict, list))
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, (dict, list))
        ]
        if not level:
            return value
    raise ValueError(f"objects and lists are nested more than {MAX_DEPTH} deep")


def shown(value: Any) -> str:
    """Spell a value for an error message: on one line, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
