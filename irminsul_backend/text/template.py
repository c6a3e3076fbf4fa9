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
from irminsul_backend.hub.tokenizer_files import read_optional_json, read_text, special_tokens


class ChatTemplate:
    """A model's chat template, rendered as the model hub's own tools render it, in a sandbox."""

    def __init__(
        self, templates: dict[str, str], tokens: dict[str, str] | None = None, sort_tool_keys: bool = False
    ) -> None:
        """Compile.

        Args:
            templates: Jinja source by name; "default", and "tool_use" for requests with tools if there is one.
            tokens: bos_token, eos_token and so on, as templates name them.
            sort_tool_keys: give tools to the template with the keys of every object in order (Kimi).

        Raises:
            UnsupportedModelError: a template is not valid Jinja.
        """
        self._tokens = tokens or {}
        self._sort_tool_keys = sort_tool_keys
        environment = _environment()
        self._templates = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise UnsupportedModelError(f"chat template {name!r}, line {error.lineno}: {error}") from error

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate:
        """Read the templates from where the model's publisher put them.

        That is, the first that exists of: chat_template.jinja and additional_chat_templates/NAME.jinja together;
        chat_template in tokenizer_config.json, a template or a list of named ones; chat_template.json. A folder with
        none of them gives a template that refuses every request.

        Raises:
            UnsupportedModelError: a file or a template is not understood; the message names it.
        """
        folder = Path(folder)
        config = read_optional_json(folder / "tokenizer_config.json")
        templates = _template_files(folder)
        for name in ("tokenizer_config.json", "chat_template.json"):
            source = None if templates else read_optional_json(folder / name).get("chat_template")
            if source is not None:
                templates = _named(folder / name, source)
        return cls(templates, special_tokens(config), _sorts_tool_keys(folder, config))

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """The prompt's text, up to where the assistant's answer begins.

        Raises:
            InvalidRequestError: there is no template, or it refuses these messages; the message says why.
        """
        template = self._templates.get("tool_use" if tools and "tool_use" in self._templates else "default")
        if template is None:
            raise InvalidRequestError(
                f"messages were given, but the model has no {self._lacking}; send the prompt as text_input or input_ids"
            )
        try:
            return template.render(
                **self._tokens,
                messages=[_with_reasoning(message) for message in messages],
                tools=_sorted_keys(tools) if self._sort_tool_keys else tools,
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program: with unusual messages it may fail in any way
            raise InvalidRequestError(f"the model's chat template cannot render these messages: {error}") from error

    @property
    def _lacking(self) -> str:
        if self._templates:
            return f"chat template for this request: none is named 'default', only {sorted(self._templates)}"
        return "chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"


def _template_files(folder: Path) -> dict[str, str]:
    found = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").exists():
        found["default"] = folder / "chat_template.jinja"
    return {name: read_text(path, "it holds a chat template") for name, path in found.items()}


def _named(path: Path, source: Any) -> dict[str, str]:
    """The chat_template field of a JSON file: a string, a list of {"name", "template"}, or an object by name."""
    try:
        named = source if isinstance(source, dict) else {"default": source}
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
        if all(isinstance(text, str) for item in named.items() for text in item):
            return named
    except (KeyError, TypeError):
        pass
    raise UnsupportedModelError(
        f'chat_template in {path} must be a string or a list of objects with a "name" and a "template"'
    )


def _sorts_tool_keys(folder: Path, config: dict[str, Any]) -> bool:
    """Whether the model's own tokenizer class sorts the keys of tools before rendering. Only its code says so."""
    classes = config.get("auto_map", {}).get("AutoTokenizer") if isinstance(config.get("auto_map"), dict) else None
    modules = {str(name).split(".")[0] for name in classes or [] if name} if isinstance(classes, list) else set()
    paths = [folder / f"{module}.py" for module in modules]
    return any("deep_sort_dict(tools)" in read_text(path, "") for path in paths if path.exists())


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value


_REASONING = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give an assistant's reasoning, under whichever name it came, the names by which templates ask for it."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


class _Generation(Extension):
    """``{% generation %}`` marks the assistant's text for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the base class)

    def parse(self, parser: Parser) -> nodes.Node:
        next(parser.stream)
        # a scope of its own: what is set inside is not seen behind it
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True))


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
