"""Chat templates: messages and tools to the text that the model was trained on."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from irminsul_backend.errors import InvalidRequestError, UnsupportedModelError
from irminsul_backend.text.folder import read_optional_json, read_text, token_text

_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """A model's chat template, rendered as the model hub's own tools render it, in a sandbox."""

    def __init__(self, templates: dict[str, str], tokens: dict[str, str] | None = None) -> None:
        """Compile.

        Args:
            templates: Jinja source by name; "default", and "tool_use" for requests with tools if there is one.
            tokens: bos_token, eos_token and so on, as templates name them.

        Raises:
            UnsupportedModelError: a template is not valid Jinja.
        """
        self._tokens = tokens or {}
        environment = _environment()
        self._templates = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise UnsupportedModelError(f"chat template {name!r}, line {error.lineno}: {error}") from error

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate:
        """Read chat_template.jinja or, without it, the chat_template of tokenizer_config.json.

        A folder that has neither gives a template that refuses every request.
        """
        folder = Path(folder)
        config = read_optional_json(folder / "tokenizer_config.json")
        tokens = {name: text for name in _TOKENS if (text := token_text(config.get(name))) is not None}
        source = config.get("chat_template")
        if (folder / "chat_template.jinja").exists():
            source = read_text(folder / "chat_template.jinja", "")
        if source is None:
            return cls({}, tokens)
        if isinstance(source, list):
            return cls({entry["name"]: entry["template"] for entry in source}, tokens)
        return cls({"default": source}, tokens)

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt's text, up to where the assistant's answer begins.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages; the message says why.
        """
        template = self._templates.get("tool_use" if tools and "tool_use" in self._templates else "default")
        if template is None:
            raise InvalidRequestError(
                "messages were given, but the model has no chat template (chat_template.jinja, or chat_template in "
                "tokenizer_config.json); send the prompt as text_input or input_ids"
            )
        try:
            return template.render(
                **self._tokens, messages=messages, tools=tools, documents=None, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program: with unusual messages it may fail in any way
            raise InvalidRequestError(f"the model's chat template cannot render these messages: {error}") from error


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


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
