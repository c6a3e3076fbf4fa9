"""Conversations, and templates with the constructs of published ones."""

from __future__ import annotations

from typing import Any

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
