"""Chat templates: render messages and tools as the text that the model was trained on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jinja2

from irminsul_backend.errors import InvalidRequestError, UnsupportedModelError
from irminsul_backend.hub.json_files import read_optional_json
from irminsul_backend.hub.template_files import read_templates, sorts_tool_keys
from irminsul_backend.hub.tokenizer_files import special_tokens
from irminsul_backend.text.client_text import mark, of_client
from irminsul_backend.text.template_environment import TemplateEnvironment

MAX_REASON = 400
"""Characters of a template's own error that are passed on; it may repeat a message."""
_WORD = re.compile(r"[\w.-]+")


class ChatTemplate:
    """A model's chat template, rendered as the model hub's own tools render it, in a sandbox."""

    def __init__(
        self, templates: dict[str, str], tokens: dict[str, str] | None = None, sort_tool_keys: bool = False
    ) -> None:
        """Compile the templates.

        Args:
            templates: Jinja source by name; "default", and "tool_use" for requests with tools if there is one.
            tokens: bos_token, eos_token and so on, as templates name them.
            sort_tool_keys: sort the keys of every object in the tools before rendering (Kimi).

        Raises:
            UnsupportedModelError: a template is not valid Jinja.
        """
        self._tokens = tokens or {}
        self._sort_tool_keys = sort_tool_keys
        environment = TemplateEnvironment()
        self._templates = {}
        for name, source in templates.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateSyntaxError as error:
                raise UnsupportedModelError(f"chat template {name!r}, line {error.lineno}: {error}") from error

    @classmethod
    def load(cls, folder: str | Path) -> ChatTemplate:
        """Read the templates of a model folder. Without any, `render` refuses every request.

        Raises:
            UnsupportedModelError: a file or a template is not understood; the message names it.
        """
        folder = Path(folder)
        config = read_optional_json(folder / "tokenizer_config.json")
        return cls(read_templates(folder), special_tokens(config), sorts_tool_keys(folder, config))

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
        """Render the prompt, up to where the assistant's reply begins; a `ClientText` where it holds the client's.

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
                messages=[_marked(_with_reasoning(message)) for message in messages],
                tools=mark(_sorted_keys(tools) if self._sort_tool_keys else tools),
                documents=None,
                add_generation_prompt=True,
            )
        except Exception as error:  # a template is a program: with unusual messages it may fail in any way
            raise InvalidRequestError(
                f"the model's chat template cannot render these messages: {_short(str(error))}"
            ) from error

    @property
    def _lacking(self) -> str:
        if self._templates:
            return f"chat template for this request: none is named 'default', only {sorted(self._templates)}"
        return "chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"


def _sorted_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted_keys(value[key]) for key in sorted(value)}
    return [_sorted_keys(item) for item in value] if isinstance(value, list) else value


def _short(text: str) -> str:
    return text if len(text) <= MAX_REASON else f"{text[:MAX_REASON]}… ({len(text)} characters)"


def _marked(message: dict[str, Any]) -> dict[str, Any]:
    """Mark what the client wrote. Templates put a role's name into a token; a word alone can be no other token."""
    role = message["role"]
    return {**mark(message), "role": role if _WORD.fullmatch(role) else of_client(role)}


_REASONING = ("reasoning_content", "thinking", "reasoning")


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copy an assistant's reasoning, sent under any of the usual names, to the names that templates read."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
