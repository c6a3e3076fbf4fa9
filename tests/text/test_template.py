"""Chat templates render as the hub's own tools render them, safely."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
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


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Wie spät ist es?"}],
    "several turns": [
        {"role": "system", "content": "  Be <brief> & 'kind' \n"},
        {"role": "system", "content": 'Answer in "quotes".'},
        {"role": "user", "content": "1 < 2?\n\n"},
        {"role": "assistant", "content": "<think>\nwell\n</think>\n\nYes.", "name": "helper"},
        {"role": "user", "content": "東京?"},
    ],
    "tools": [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "I must look.",
            "tool_calls": [
                {
                    "id": "functions.f:0",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"b": 1, "a": "é"}'},
                },
                {"id": "functions.g:1", "type": "function", "function": {"name": "g", "arguments": '{"x": ["<"]}'}},
            ],
        },
        {"role": "tool", "content": "18 °C", "tool_call_id": "functions.f:0", "name": "f"},
        {"role": "tool", "content": "{}", "tool_call_id": "functions.g:1"},
        {"role": "assistant", "content": "Mild."},
        {"role": "user", "content": "Thanks."},
    ],
    "tools and text": [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning": "hm",
            "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "cold", "tool_call_id": "1"},
    ],
}
FAMILIES = {
    # system texts gathered in a namespace, flags between turns, calls concatenated, the thinking cut away
    "deepseek v3": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(first=true, in_tools=false, open=false, system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{%- if ns.first %}{% set ns.system = ns.system + message['content'] %}{% set ns.first = false %}
{%- else %}{% set ns.system = ns.system + '\n\n' + message['content'] %}{%- endif %}{%- endif %}{%- endfor %}
{{ bos_token }}{{ ns.system }}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.in_tools = false -%}{{ '<|user|>' + message['content'] }}{%- endif %}
{%- if message['role'] == 'assistant' and 'tool_calls' in message %}
  {%- set ns.open = false -%}
  {%- for call in message['tool_calls'] %}
    {%- if not ns.open %}{{ '<|assistant|>' if message['content'] is none else '<|assistant|>' + message['content'] }}
      {{- '<|calls|>' }}{%- set ns.open = true %}{%- else %}{{ '\n' }}{%- endif %}
    {{- call['type'] + '<|sep|>' + call['function']['name'] + '\n```json\n' + call['function']['arguments'] + '\n```' }}
  {%- endfor %}{{ '<|calls end|>' + eos_token }}
{%- elif message['role'] == 'assistant' %}
  {%- set content = message['content'] %}
  {%- if '</think>' in content %}{%- set content = content.split('</think>')[-1] %}{%- endif %}
  {{- ('<|outputs end|>' if ns.in_tools else '<|assistant|>') + content + eos_token }}{%- set ns.in_tools = false %}
{%- endif %}
{%- if message['role'] == 'tool' %}
  {{- '\n' if ns.in_tools else '<|outputs|>' }}{{ message['content'] }}{%- set ns.in_tools = true %}
{%- endif %}
{%- endfor -%}
{% if ns.in_tools %}{{ '<|outputs end|>' }}{% endif %}
{%- if add_generation_prompt and not ns.in_tools %}{{ '<|assistant|><think>\n' }}{% endif %}""",
    # plain words for roles
    "deepseek v2": """{{ bos_token }}{% for message in messages %}
{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] + '\n\n' }}
{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + (message['content'] or '') + eos_token }}
{% elif message['role'] == 'system' %}{{ message['content'] + '\n\n' }}{% endif %}
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}""",
    # a default system turn before the first, role and name inside the header
    "moonlight": """{%- for message in messages -%}
    {%- if loop.first and messages[0]['role'] != 'system' -%}
        {{ '<|system|>system<|middle|>You are helpful.<|end|>' }}
    {%- endif -%}
    {%- if message['role'] == 'system' -%}{{ '<|system|>' }}{%- endif -%}
    {%- if message['role'] in ['user', 'tool'] -%}{{ '<|user|>' }}{%- endif -%}
    {%- if message['role'] == 'assistant' -%}{{ '<|assistant|>' }}{%- endif -%}
    {{ message['role'] }}{{ '<|middle|>' }}{{ message['content'] }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>assistant<|middle|>' }}{%- endif -%}""",
    # macros, compact JSON of tools, ids of calls, the last turns kept apart by slices
    "kimi k2": """{% macro content(message) -%}
  {%- set text = message.get('content') -%}
  {%- if text is string -%}{{ text }}{%- elif text is iterable -%}{%- for part in text %}{{ part.text }}{% endfor -%}
  {%- endif -%}
{%- endmacro %}
{% macro calls(message) -%}
  {{- '<|calls|>' -}}
  {%- for call in message['tool_calls'] -%}
    {%- set arguments = call['function']['arguments'] -%}
    <|call|>{{ call['id'] }}<|args|>
    {%- if arguments is string %}{{ arguments }}{% else %}{{ arguments | tojson }}{% endif %}
    {{- '<|call end|>' -}}
  {%- endfor -%}
  {{- '<|calls end|>' -}}
{%- endmacro %}
{%- set ns = namespace(last=-1) -%}
{%- for i in range(messages | length - 1, -1, -1) -%}
  {%- if ns.last < 0 and messages[i]['role'] == 'assistant' and not messages[i].get('tool_calls') -%}
    {%- set ns.last = i -%}{%- endif -%}
{%- endfor -%}
{%- set past, present = messages[:ns.last + 1], messages[ns.last + 1:] -%}
{%- if tools -%}<|system|>declare<|middle|>{{ tools | tojson(separators=(',', ':')) }}<|end|>{%- endif -%}
{%- for message in past + present -%}
  {%- set name = message.get('name') or message['role'] -%}
  <|{{ message['role'] }}|>{{ name }}<|middle|>
  {%- if message['role'] == 'assistant' -%}
    {%- if not loop.index0 <= ns.last -%}<think>{{ message.get('reasoning_content', '') }}</think>{%- endif -%}
    {{ content(message) }}{%- if message.get('tool_calls') -%}{{ calls(message) }}{%- endif -%}
  {%- elif message['role'] == 'tool' -%}
    ## Return of {{ message.get('tool_call_id', '') }}\n{{ content(message) }}
  {%- elif message['content'] is not none -%}{{ content(message) }}{%- endif -%}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>assistant<|middle|>{%- endif -%}""",
    # backwards for the last question, lists of tools line by line, optional switches, filters
    "joyai flash": """{%- if tools %}
    {{- '<|system|>\n' }}{%- if messages[0].role == 'system' %}{{- messages[0].content | trim + '\n\n' }}{%- endif %}
    {{- "# Tools\n<tools>" }}
    {%- for tool in tools %}{{- "\n" }}{{- tool | tojson }}
    {%- for key, value in tool.function.items() if key != 'name' %}{{ loop.index ~ key ~ value | string }}{% endfor %}
    {%- endfor %}
    {{- '\n</tools>' ~ tools | map(attribute='function') | map(attribute='name') | join(', ') }}
{%- elif messages[0].role == 'system' %}{{- '<|system|>\n' + messages[0].content }}
{%- endif %}
{%- set ns = namespace(searching=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.searching and message.role == "user" and message.content is string
        and not(message.content.startswith('<result>') and message.content.endswith('</result>')) %}
        {%- set ns.searching = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if loop.index0 > 20 %}{% break %}{% endif %}
    {%- if message.role == "system" and loop.first %}{% continue %}{% endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning = '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in message.content %}
            {%- set reasoning = message.content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- generation %}
        {{- '<|assistant|>' }}{% if loop.index0 > ns.last and reasoning %}{{ '<think>' + reasoning | trim }}{% endif %}
        {%- set inner = 1 %}{{- message.content | default('', true) }}{{ eos_token }}
        {%- endgeneration %}{{ inner is defined }}
        {%- for call in message.tool_calls | default([]) %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {{- '\n{"name": "' + call.name + '", "arguments": ' + call.arguments | tojson + '}' }}
        {%- endfor %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (messages[loop.index0 - 1].role != "tool") %}{{- '<|user|>' }}{%- endif %}
        {{- '\n<result>' + message.content + '</result>' }}
        {%- if loop.last or (loop.nextitem.role != "tool") %}{{- '<|end|>\n' }}{%- endif %}
    {%- else %}
        {{- '<|' ~ message.role | upper ~ '|>' ~ message.content | replace('\n', ' ') ~ message | dictsort }}
    {%- endif %}
{%- endfor %}
{{- strftime_now('%Y') | length }}{{ dict(a=1, b='<') | tojson(indent=2, sort_keys=true) }}
{{- [1, 'ä'] | tojson(ensure_ascii=true) }}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}
{%- endif %}""",
}
TOKENS = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}


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
