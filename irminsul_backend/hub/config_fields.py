"""FieldReader: typed access to config.json that notes every problem instead of stopping at the first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from irminsul_backend.hub.json_file import shown

MAX_SIZE = 10_000_000
"""Of a dimension; a vocabulary, the largest in published models, has some hundred thousand."""
MAX_NUMBER = 1e30
"""Of a number; positive ones are at least 1 / MAX_NUMBER, so that products and quotients of a few stay finite."""


class FieldReader:
    """Reads fields of one JSON object. A problem is noted with field and value, and a harmless value is returned."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "", problems: list[str] | None = None) -> None:
        self.raw, self.prefix = raw, prefix
        self.problems: list[str] = [] if problems is None else problems
        self.bad: set[str] = set()
        """Fields whose returned value means nothing."""

    def value(self, name: str, default: Any = None) -> Any:
        """The field, or `default` where it is missing or null."""
        value = self.raw.get(name)
        return default if value is None else value

    def refuse(self, name: str, limit: str, value: Any = None) -> None:
        """Note that field `name` (its value, or `value`) breaks `limit`."""
        found = self.raw.get(name) if value is None else value
        self.problems.append(f"{self.prefix}{name} is {shown(found)}; {limit}")
        self.bad.add(name)

    def integer(self, name: str, default: int | None = None, at_least: int = 1, at_most: int = MAX_SIZE) -> int:
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            self.refuse(name, f"it must be an integer, at least {at_least}")
            return at_least
        if value > at_most:
            self.refuse(name, f"it must be at most {at_most:,}", value)
            return at_least
        return value

    def number(self, name: str, default: float | None = None, over: float | None = 0) -> float:
        """A number over `over`, or at least 0 if that is None; its magnitude is within MAX_NUMBER."""
        value = self.value(name, default)
        valid = isinstance(value, (int, float)) and not isinstance(value, bool)
        valid = valid and (isinstance(value, int) or math.isfinite(value))
        if not valid or (value < 0 if over is None else value <= over):
            self.refuse(name, f"it must be a number {'at least 0' if over is None else f'over {over}'}")
            return 1.0 if over is None else over + 1.0
        if value > MAX_NUMBER or 0 < value < 1 / MAX_NUMBER:
            self.refuse(name, f"it must be from {1 / MAX_NUMBER:g} to {MAX_NUMBER:g}", value)
            return 1.0 if over is None else over + 1.0
        return float(value)

    def boolean(self, name: str, default: bool | None = None) -> bool:
        value = self.value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "it must be true or false")
            return False
        return value

    def choice(self, name: str, understood: tuple[str, ...], default: str | None = None) -> str:
        value = self.value(name, default)
        if value not in understood:
            self.refuse(name, f"understood: {', '.join(understood)}")
            return understood[0]
        return str(value)

    def refuse_unless(self, name: str, understood: tuple[Any, ...]) -> None:
        """A field that may be missing, but if it is there must have one of these values."""
        if name in self.raw and self.raw[name] not in understood:
            self.refuse(name, f"only {understood[0]!r} is understood")
