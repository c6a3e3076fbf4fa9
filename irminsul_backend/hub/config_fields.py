"""FieldReader: typed access to the fields of config.json that notes every problem instead of stopping at the first."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.json_files import shown

MAX_SIZE = 10_000_000
"""Largest dimension; the largest in published models, a vocabulary, has some hundred thousand."""
MAX_POSITIONS = 1_000_000_000
"""Largest max_position_embeddings."""
MAX_NUMBER = 1e30
"""Largest number. The smallest positive one is 1 / MAX_NUMBER, so that products and quotients of a few stay finite.

All these limits lie far above published models: they turn a damaged file into a message instead of a long wait.
"""


class FieldReader:
    """Reads the fields of one JSON object.

    A field that breaks its limit is noted in `problems` with its value and the limit, and a harmless value is returned
    in its place, so that all problems of a file can be told at once.
    """

    def __init__(self, raw: Mapping[str, Any], prefix: str = "", problems: list[str] | None = None) -> None:
        """`prefix` stands before field names in messages; an inner object shares the `problems` of the outer one."""
        self.raw, self.prefix = raw, prefix
        self.problems: list[str] = [] if problems is None else problems
        self.bad: set[str] = set()
        """Fields whose returned value means nothing."""

    def check(self, file: str | Path) -> None:
        """Raise UnsupportedModelError naming `file` and all problems, if there are any."""
        if self.problems:
            raise UnsupportedModelError(f"{file}: {'; also '.join(self.problems)}")

    def value(self, name: str, default: Any = None) -> Any:
        """Return the field, or `default` where it is missing or null."""
        value = self.raw.get(name)
        return default if value is None else value

    def refuse(self, name: str, limit: str, value: Any = None) -> None:
        """Note that field `name` (its value, or `value`) breaks `limit`."""
        found = self.raw.get(name) if value is None else value
        said = "is missing" if found is None and name not in self.raw else f"is {shown(found)}"
        self.problems.append(f"{self.prefix}{name} {said}; {limit}")
        self.bad.add(name)

    def integer(self, name: str, default: int | None = None, at_least: int = 1, at_most: int = MAX_SIZE) -> int:
        """Return an integer from `at_least` to `at_most`."""
        value = self.value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            self.refuse(name, f"it must be an integer, at least {at_least}")
            return at_least
        if value > at_most:
            self.refuse(name, f"it must be at most {at_most:,}", value)
            return at_least
        return value

    def optional_integer(self, name: str, at_least: int = 1) -> int | None:
        """Return an integer as :meth:`integer` does, or None where the field is missing or null."""
        return None if self.value(name) is None else self.integer(name, at_least=at_least)

    def number(self, name: str, default: float | None = None, over: float | None = 0) -> float:
        """Return a number over `over`, or at least 0 if that is None; its magnitude is within MAX_NUMBER."""
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
        """Return true or false."""
        value = self.value(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "it must be true or false")
            return False
        return value

    def choice(self, name: str, understood: tuple[str, ...], default: str | None = None) -> str:
        """Return one of the texts in `understood`."""
        value = self.value(name, default)
        if value not in understood:
            self.refuse(name, f"understood: {', '.join(understood)}")
            return understood[0]
        return str(value)

    def refuse_unless(self, name: str, understood: tuple[Any, ...]) -> None:
        """Refuse a field that is there with a value outside `understood`; it may be missing."""
        if name in self.raw and self.raw[name] not in understood:
            self.refuse(name, f"only {understood[0]!r} is understood")
