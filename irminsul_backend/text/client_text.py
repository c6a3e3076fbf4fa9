"""Text that knows which of its characters a client sent, through whatever a chat template does with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

Spans = tuple[tuple[int, int], ...]
"""(begin, end) of the client's characters, ascending, without empty ones."""

_BEGIN, _END = "\ufdd0", "\ufdd1"
"""Noncharacters that stand around the client's text while a function of Python's own puts texts together."""


class ClientText(str):
    """A str of which some characters are a client's.

    It compares, hashes and reads as the plain text, so that a template decides as it always does. What is made of it
    by adding, slicing, splitting, stripping, replacing, joining or changing case knows its client's characters, too;
    what any other method makes of it counts as the client's as a whole.
    """

    __slots__ = ("_spans",)
    _spans: Spans

    def __new__(cls, text: str = "", spans: Spans = ()) -> ClientText:
        made = super().__new__(cls, plain(text))
        made._spans = spans
        return made

    def __str__(self) -> str:
        return self

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, times: SupportsIndex) -> str:
        return concat([self] * times.__index__())

    __rmul__ = __mul__

    def __iter__(self) -> Iterator[str]:
        return (self[at : at + 1] for at in range(len(self)))

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        text = str.__getitem__(self, key)
        if isinstance(key, slice):
            begin, end, step = key.indices(len(self))
            if step != 1:
                return of_client(text)
        else:
            begin = key.__index__() % len(self)
            end = begin + 1
        inside = ((max(b, begin) - begin, min(e, end) - begin) for b, e in self._spans)
        return _make(text, tuple((b, e) for b, e in inside if b < e))

    def join(self, parts: Iterable[str]) -> str:
        between: list[str] = []
        for part in parts:
            between += (self, part)
        return concat(between[1:])

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return of_client(str.replace(self, old, new, count))
        pieces = self.split(old, count)
        return of_template(new).join(pieces)

    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.split(self, sep, maxsplit), len(sep or ""))

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._locate(str.rsplit(self, sep, maxsplit), len(sep or ""))

    def splitlines(self, keepends: bool = False) -> list[str]:
        return self._locate(str.splitlines(self, keepends))

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._locate(list(str.partition(self, sep)))
        return before, found, after

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        before, found, after = self._locate(list(str.rpartition(self, sep)))
        return before, found, after

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> str:
        return self[len(self) - len(str.lstrip(self, chars)) :]

    def rstrip(self, chars: str | None = None, /) -> str:
        return self[: len(str.rstrip(self, chars))]

    def removeprefix(self, prefix: str, /) -> str:
        return self[len(prefix) :] if prefix and self.startswith(prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self[: -len(suffix)] if suffix and self.endswith(suffix) else self

    def _locate(self, pieces: list[str], between: int = 0) -> list[str]:
        """Cut `pieces`, which str's own method found in this order, out of this text.

        Between two of them lie `between` characters, or if that is 0 such as no piece begins with.
        """
        out, at = [], 0
        for piece in pieces:
            begin = at if between else self.index(piece, at)
            out.append(self[begin : begin + len(piece)])
            at = begin + len(piece) + between
        return out


def of_client(text: str) -> str:
    """Mark a whole text as the client's."""
    return _make(text, ((0, len(text)),) if text else ())


def of_template(text: str) -> ClientText:
    """Give a plain text the methods that keep track of the client's characters in their arguments."""
    return text if isinstance(text, ClientText) else ClientText(text)


def plain(text: str) -> str:
    """Return the text as a str proper."""
    return str.__str__(text)


def client_spans(text: str) -> Spans:
    """Where the client's characters are; of a plain str, nowhere."""
    return text._spans if isinstance(text, ClientText) else ()


def has_client_text(value: Any) -> bool:
    """Whether a value of a template may hold a client's text; a list or an object always counts as one that does."""
    return isinstance(value, (dict, list, tuple)) or bool(isinstance(value, str) and client_spans(value))


def mark(value: Any) -> Any:
    """Mark every text in a JSON value, keys included, as the client's."""
    if isinstance(value, str):
        return of_client(value)
    if isinstance(value, dict):
        return {mark(key): mark(item) for key, item in value.items()}
    return [mark(item) for item in value] if isinstance(value, list) else value


def concat(parts: Iterable[Any]) -> str:
    """Join what a template puts out."""
    texts = [_to_text(part) for part in parts]
    spans: list[tuple[int, int]] = []
    at = 0
    for text in texts:
        if isinstance(text, ClientText):
            for begin, end in text._spans:
                if spans and spans[-1][1] == at + begin:
                    spans[-1] = (spans[-1][0], at + end)
                else:
                    spans.append((at + begin, at + end))
        at += len(text)
    return _make("".join(texts), tuple(spans))


def through(function: Callable[..., str], *args: Any, **named: Any) -> str:
    """Call a function that formats texts, and find the client's characters in the text that it returns."""
    values = [item for value in (*args, *named.values()) for item in (value if isinstance(value, tuple) else (value,))]
    signs_or_containers = (
        isinstance(value, (dict, list)) or (isinstance(value, str) and (_BEGIN in value or _END in value))
        for value in values
    )
    if any(signs_or_containers):
        return of_client(function(*args, **named))
    marked = function(*map(_put_signs, args), **{name: _put_signs(value) for name, value in named.items()})
    first, *parts = marked.split(_BEGIN)
    pieces = [first]
    for part in parts:
        text, _, rest = part.partition(_END)
        pieces += (of_client(text), rest)
    return concat(pieces)


def _put_signs(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_put_signs, value))
    return f"{_BEGIN}{plain(value)}{_END}" if has_client_text(value) else value


def _make(text: str, spans: Spans) -> str:
    return ClientText(text, spans) if spans else plain(text)


def _to_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return of_client(str(value)) if has_client_text(value) else str(value)


def _changed(name: str) -> Callable[..., str]:
    """Build a method of str whose result keeps its characters' places, or else is the client's as a whole."""
    method = getattr(str, name)

    def call(self: ClientText, *args: Any) -> str:
        text: str = method(self, *args)
        return _make(text, self._spans) if len(text) == len(self) else of_client(text)

    call.__name__ = name
    return call


for _name in ("lower", "upper", "capitalize", "title", "swapcase", "casefold"):
    setattr(ClientText, _name, _changed(_name))


def _as_a_whole(name: str) -> Callable[..., str]:
    method = getattr(str, name)

    def call(self: ClientText, *args: Any) -> str:
        text: str = method(self, *args)
        return of_client(text) if self._spans else text

    call.__name__ = name
    return call


for _name in ("center", "ljust", "rjust", "zfill", "expandtabs", "translate"):
    setattr(ClientText, _name, _as_a_whole(_name))
