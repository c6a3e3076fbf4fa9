"""The one place where JSON of a model folder is parsed."""

from __future__ import annotations

import json
from typing import Any

MAX_DEPTH = 64
"""Deepest nesting of objects and lists; published files need 6. Deeper values could not be printed again."""


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; raises ValueError if it is none, or nested deeper than MAX_DEPTH."""
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
    """The value as an error message spells it: one line, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text)} characters)"
