"""Chat templates render as the hub's own tools render them, safely."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from chat_templates import CONVERSATIONS, FAMILIES, MESSAGES, SOURCE, TOKENS, TOOLS
from transformers import AutoTokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from irminsul_backend.errors import InvalidRequestError, UnsupportedModelError
from irminsul_backend.text import ChatTemplate


@pytest.mark.parametrize("tools", [None, [*TOOLS, *TOOLS]], ids=["no tools", "two tools"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("family", FAMILIES)
def test_constructs_of_published_templates(family: str, conversation: str, tools: list[dict[str, Any]] | None) -> None:
    messages = CONVERSATIONS[conversation]
    if family == "joyai flash":  # its published form looks for a word in a content that is none
        messages = [{**message, "content": message["content"] or ""} for message in messages]
    (want,), _ = render_jinja_template(
        conversations=[messages], tools=tools, chat_template=FAMILIES[family], add_generation_prompt=True, **TOKENS
    )
    assert ChatTemplate({"default": FAMILIES[family]}, TOKENS).render(messages, tools) == want
    assert len(want) > 20


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
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ nothing | tojson }}", "Undefined is not JSON serializable"),
        ("{% include 'x' %}", "no loader"),
        ("{{ range(9 ** 9) | length }}", "Range too big"),
        ("{{ messages[0].update({'content': ''}) }}", "unsafe|not safely callable"),
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

    def more(self, folder: Path, name: str, source: str) -> None:
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source)

    def test_from_tokenizer_config(self, tmp_path: Path) -> None:
        self.write(tmp_path, chat_template="{{ bos_token }}{{ eos_token }}", bos_token="B", eos_token={"content": "E"})
        assert ChatTemplate.load(tmp_path).render(MESSAGES) == "BE"

    def test_the_file_wins(self, tmp_path: Path) -> None:
        self.write(tmp_path, chat_template="old", bos_token="B")
        (tmp_path / "chat_template.json").write_text('{"chat_template": "older"}')
        (tmp_path / "chat_template.jinja").write_text("new {{ bos_token }}", encoding="utf-8")
        assert ChatTemplate.load(tmp_path).render(MESSAGES) == "new B"

    @pytest.mark.parametrize(
        "source", ["plain {{ bos_token }}", {"default": "plain B"}, [{"name": "default", "template": "plain B"}]]
    )
    def test_from_chat_template_json(self, tmp_path: Path, source: Any) -> None:
        self.write(tmp_path, bos_token="B")
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": source}))
        assert ChatTemplate.load(tmp_path).render(MESSAGES) == "plain B"

    def test_named_templates(self, tmp_path: Path) -> None:
        named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
        self.write(tmp_path, chat_template=named)
        template = ChatTemplate.load(tmp_path)
        assert template.render(MESSAGES) == "plain"
        assert template.render(MESSAGES, []) == "plain"
        assert template.render(MESSAGES, TOOLS) == "tools"

    def test_named_files(self, tmp_path: Path) -> None:
        """Files leave nothing of what tokenizer_config.json says."""
        self.write(
            tmp_path, chat_template=[{"name": "default", "template": "o"}, {"name": "tool_use", "template": "o"}]
        )
        (tmp_path / "chat_template.jinja").write_text("plain")
        assert ChatTemplate.load(tmp_path).render(MESSAGES, TOOLS) == "plain"
        self.more(tmp_path, "tool_use", "tools")
        self.more(tmp_path, "rag", "documents")
        assert ChatTemplate.load(tmp_path).render(MESSAGES, TOOLS) == "tools"
        assert ChatTemplate.load(tmp_path).render(MESSAGES) == "plain"

    def test_the_hub_reads_the_same(self, folder: Path) -> None:
        """Each way to give a template, read by transformers from the same folder."""

        def agree() -> None:
            theirs = AutoTokenizer.from_pretrained(folder)
            ours = ChatTemplate.load(folder)
            messages = CONVERSATIONS["several turns"]
            for tools in (None, TOOLS):
                want = theirs.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
                assert ours.render(messages, tools) == want

        named = [{"name": "default", "template": FAMILIES["moonlight"]}, {"name": "tool_use", "template": SOURCE}]
        tokens = {"bos_token": "<|begin|>", "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
        self.write(folder, chat_template=named, **tokens)
        agree()
        self.write(folder, chat_template=FAMILIES["deepseek v3"], **tokens)
        agree()
        (folder / "chat_template.jinja").write_text(FAMILIES["joyai flash"])
        agree()
        self.more(folder, "tool_use", FAMILIES["kimi k2"])
        agree()

    def test_no_default(self, tmp_path: Path) -> None:
        self.more(tmp_path, "tool_use", "tools")
        template = ChatTemplate.load(tmp_path)
        assert template.render(MESSAGES, TOOLS) == "tools"
        with pytest.raises(InvalidRequestError, match=r"none is named 'default', only \['tool_use'\]; send the prompt"):
            template.render(MESSAGES)

    def test_without_a_template_messages_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidRequestError, match=r"no chat template .* send the prompt as text_input"):
            ChatTemplate.load(tmp_path).render(MESSAGES)

    @pytest.mark.parametrize(
        "source", [3, [{"name": "default"}], ["x"], {"default": None}, [{"name": 1, "template": ""}]]
    )
    def test_a_template_of_another_form(self, tmp_path: Path, source: Any) -> None:
        self.write(tmp_path, chat_template=source)
        with pytest.raises(UnsupportedModelError, match=r"chat_template in .*tokenizer_config\.json must be a string"):
            ChatTemplate.load(tmp_path)

    @pytest.mark.parametrize("sorts", [True, False])
    def test_a_tokenizer_that_sorts_tools(self, tmp_path: Path, sorts: bool) -> None:
        """Kimi's class hands tools to the template with their keys in order."""
        source = "{{ tools | tojson(separators=(',', ':')) }}"
        automatic = {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}
        self.write(tmp_path, chat_template=source, auto_map=automatic)
        code = "tools = deep_sort_dict(tools)" if sorts else "pass"
        (tmp_path / "tokenization_kimi.py").write_text(f"def apply_chat_template(self, tools):\n    {code}\n")
        rendered = ChatTemplate.load(tmp_path).render(MESSAGES, [{"z": [{"b": 1, "a": 2}], "c": "<ä>"}])
        assert rendered == ('[{"c":"<ä>","z":[{"a":2,"b":1}]}]' if sorts else '[{"z":[{"b":1,"a":2}],"c":"<ä>"}]')
