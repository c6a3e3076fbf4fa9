"""Reading the JSON files of a Hugging Face model folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from irminsul_backend.errors import UnsupportedModelError


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
        value = json.loads(text)
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
