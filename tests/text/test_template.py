"""Chat templates render as the hub's own tools render them, safely."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from irminsul_backend.errors import InvalidRequestError, UnsupportedModelError
from irminsul_backend.text import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be <brief> & 'kind'"},
    {"role": "user", "content": "Grüße\n"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "f", "arguments": {"b": 1, "a": "é"}}}],
    },
]
TOOLS = [{"type": "function", "function": {"name": "f", "z": 1, "a": "<ä>"}}]
SOURCE = """{% if tools %}
    {{ tools | tojson(indent=2) }}
  {% endif %}
{{ bos_token }}
{%- for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
<|{{ message['role'] }}|>{{ message.content or '' }}
    {% for call in message.tool_calls or [] %}
{{ call.function.arguments | tojson }}
    {% endfor %}
    {% if message.role == 'assistant' %}{% generation %}G{{ eos_token }}{% endgeneration %}{% endif %}
{% endfor %}
{% if documents is defined and documents %}D{% endif %}
{% if add_generation_prompt %}<|assistant|>{% endif %}
"""


@pytest.mark.parametrize("tools", [None, TOOLS])
def test_renders_as_transformers_does(tools: list[dict[str, Any]] | None) -> None:
    tokens = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    want, _ = render_jinja_template(
        conversations=[MESSAGES], tools=tools, chat_template=SOURCE, add_generation_prompt=True, **tokens
    )
    assert ChatTemplate({"default": SOURCE}, tokens).render(MESSAGES, tools) == want[0]


def test_strftime_now_is_the_date() -> None:
    template = ChatTemplate({"default": "{{ strftime_now('%Y') }}"})
    assert int(template.render(MESSAGES)) in (datetime.now().year, datetime.now().year - 1)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[9].content.strip() }}", "no element 9"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_a_template_that_fails_refuses_the_request(source: str, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"cannot render these messages: .*({reason})"):
        ChatTemplate({"default": source}).render(MESSAGES)


def test_a_broken_template_is_found_at_load() -> None:
    with pytest.raises(UnsupportedModelError, match="chat template 'default', line 2"):
        ChatTemplate({"default": "a\n{% if %}"})


class TestLoad:
    def write(self, folder: Path, **config: Any) -> None:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))

    def test_from_tokenizer_config(self, tmp_path: Path) -> None:
        self.write(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}", bos_token="B", eos_token={"content": "E"})
        assert ChatTemplate.load(tmp_path).render(MESSAGES) == "BE"

    def test_the_file_wins(self, tmp_path: Path) -> None:
        self.write(tmp_path, chat_template="old", bos_token="B")
        (tmp_path / "chat_template.jinja").write_text("new {{ bos_token }}", encoding="utf-8")
        assert ChatTemplate.load(tmp_path).render(MESSAGES) == "new B"

    def test_named_templates(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        self.write(tmp_path, chat_template=named)
        template = ChatTemplate.load(tmp_path)
        assert template.render(MESSAGES) == "plain"
        assert template.render(MESSAGES, []) == "plain"
        assert template.render(MESSAGES, TOOLS) == "tools"

    def test_without_a_template_messages_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match=r"no chat template .* send the prompt as text_input"):
            ChatTemplate.load(tmp_path).render(MESSAGES)
