"""The shipped model's tokenizer: byte-level BPE, trained on `corpus`; and its chat template."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

from irminsul_backend.training.corpus import documents

VOCAB_SIZE = 8192
BEGIN, END = "<|begin|>", "<|end|>"
ROLES = ("system", "tool_schema", "doc", "user", "assistant", "tool")
SPECIAL_TOKENS = (BEGIN, END, *(f"<|{role}|>" for role in ROLES), "<|role|>")
"""Ids 0, 1, 2, ... in this order."""
GENERATED_DOCUMENTS = 3000

WORDS = Regex(
    r" ?[\p{L}\p{M}]+"  # a word with its space
    r"|[_./-]?[\p{L}\p{M}]+"  # the next part of an identifier or a path
    r"|\p{N}{1,3}"  # digits in groups, so that numbers cannot fill the vocabulary
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"  # punctuation with its space and its line end
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"  # line ends, indentation
)

CHAT_TEMPLATE = """\
{#- Begin; leading system messages; one message a tool; the rest. A message is its role's token and its content;
    only assistant messages are closed, by the end token. -#}
{%- macro text(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- elif content is not none -%}
        {%- for part in content -%}
            {%- if part.type != 'text' -%}
                {{- raise_exception('content part of type ' ~ part.type ~ ' is not text') -}}
            {%- endif -%}
            {{- part.text -}}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- macro schemas() -%}
    {%- for tool in tools or [] -%}
        {{- '<|tool_schema|>' ~ (tool | tojson) -}}
    {%- endfor -%}
{%- endmacro -%}
{{- '<|begin|>' -}}
{%- set seen = namespace(tools=false) -%}
{%- for message in messages -%}
    {%- if message.role != 'system' and not seen.tools -%}
        {{- schemas() -}}
        {%- set seen.tools = true -%}
    {%- endif -%}
    {%- if message.role in ['system', 'tool_schema', 'doc', 'user', 'assistant', 'tool'] -%}
        {{- '<|' ~ message.role ~ '|>' -}}
    {%- else -%}
        {{- '<|role|>' ~ message.role ~ '\\n' -}}
    {%- endif -%}
    {{- text(message.content) -}}
    {%- if message.role == 'assistant' -%}
        {%- for call in message.tool_calls or [] -%}
            {{- '\\n' ~ ((call.function or call) | tojson) -}}
        {%- endfor -%}
        {{- '<|end|>' -}}
    {%- endif -%}
{%- endfor -%}
{%- if not seen.tools -%}
    {{- schemas() -}}
{%- endif -%}
{%- if add_generation_prompt -%}
    {{- '<|assistant|>' -}}
{%- endif -%}
"""


def train_tokenizer(seed: int) -> Tokenizer:
    """Train on the corpus; the same interpreter and `tokenizers` release give the same merges."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(WORDS, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=True,
    )
    tokenizer.train_from_iterator(documents(seed, GENERATED_DOCUMENTS), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_positions: int) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja."""
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
