"""The sandbox in which chat templates run, which keeps track of the client's characters in what they put out."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import filters, nodes
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from irminsul_backend.text.client_text import (
    ClientText,
    concat,
    has_client_text,
    of_client,
    of_template,
    plain,
    through,
)


class _Generator(CodeGenerator):
    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """``~``, by the environment's function instead of Jinja's own."""
        self.write("environment.concat((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Renders as the model hub's tools do; the text is a ClientText where a client's text is part of it."""

    code_generator_class = _Generator
    concat = staticmethod(concat)
    intercepted_binops = frozenset(["%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_whole_containers
        )
        self.filters |= {"tojson": _to_json, "format": _format, "join": _join}
        self.filters = {name: _keeping_track(function) for name, function in self.filters.items()}
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def getattr(self, obj: Any, attribute: str) -> Any:
        return super().getattr(of_template(obj) if type(obj) is str else obj, attribute)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format_text = super().wrap_str_format(value)
        if format_text is None:
            return None
        if has_client_text(value.__self__):
            return lambda *args, **named: of_client(format_text(*args, **named))
        return functools.partial(through, format_text)

    def call_binop(self, context: Any, operator_name: str, left: Any, right: Any) -> Any:
        if operator_name == "%" and isinstance(left, str):
            return _format(left, *(right if isinstance(right, tuple) else (right,)))
        return super().call_binop(context, operator_name, left, right)


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        next(parser.stream)
        # in a scope of its own: variables set inside are not visible after it
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _whole_containers(value: Any) -> Any:
    return of_client(str(value)) if isinstance(value, (dict, list, tuple)) else value


def _keeping_track(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a filter's text the client's if it was made of a client's text and does not know its characters."""

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        out = function(*args, **named)
        if isinstance(out, str) and not isinstance(out, ClientText):
            return of_client(out) if any(map(has_client_text, (*args, *named.values()))) else out
        return out

    return call


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        value = map(filters.make_attrgetter(environment, attribute), value)
    return of_template(d).join(map(concat, zip(value)))


def _format(value: str, *args: Any, **named: Any) -> str:
    def form(*parts: Any, **names: Any) -> str:
        return plain(value) % (names or (parts[0] if len(parts) == 1 and isinstance(parts[0], dict) else parts))

    return of_client(form(*args, **named)) if has_client_text(value) else through(form, *args, **named)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON; Jinja's own filter escapes HTML and sorts keys, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
