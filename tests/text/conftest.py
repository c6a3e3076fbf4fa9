"""Small tokenizers of every kind that matters, built here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

CORPUS = [
    "The agent reads the tool's answer, then it answers. 12345 67 8\n\n  indented\ttext\r\n",
    "Ångström naïve 東京 日本語 🙂👩‍👩‍👧 ﬁne ẞtraße",
    '{"name": "get_user", "arguments": {"id": 17}}',
]
PLAIN = ["<|begin|>", "<|end|>", "<|user|>", "<|user|>x", "<<", "<|in</think>side|>"]
"""Special and not normalised; two share a beginning, one holds a normalised one."""
NORMALISED = ["<think>", "</think>", "<|Tool|>", "Ok", "\n\n", "｜"]


def definition(normalizer: Any = None, pre_tokenizer: Any = None, **flags: bool) -> dict[str, Any]:
    """tokenizer.json of a byte-level BPE; `flags` go to one more added token, "<mask>"."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizer or byte_level
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in PLAIN])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=True) for text in NORMALISED])
    if flags:
        tokenizer.add_special_tokens([AddedToken("<mask>", special=True, normalized=False, **flags)])
    return json.loads(tokenizer.to_str())


def with_bos(value: dict[str, Any]) -> dict[str, Any]:
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(value))
    begin = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A <|end|>", special_tokens=[("<|begin|>", begin), ("<|end|>", begin + 1)]
    )
    return json.loads(tokenizer.to_str())


@pytest.fixture(scope="session")
def definitions() -> dict[str, dict[str, Any]]:
    """tokenizer.json objects by kind."""
    space = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    cut_off = definition()
    cut_off["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    cut_off["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    rules = [
        r"\p{N}{1,3}",
        r"[\u4e00-\u9fa5\u3040-\u30ff]+",
        r"\s?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ]
    in_steps = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(tokenizers.Regex(rule), "isolated") for rule in rules),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return {
        "byte_level": definition(),
        "deepseek": definition(normalizers.Sequence([]), in_steps),
        "empty_normalizer": definition(normalizers.Sequence([])),
        "changing_normalizer": definition(normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])),
        "prepending_normalizer": definition(space),
        "prefix_space": definition(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        "metaspace": definition(
            pre_tokenizer=pre_tokenizers.Sequence(
                [pre_tokenizers.Metaspace(prepend_scheme="first"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        ),
        "lstrip": definition(lstrip=True),
        "rstrip": definition(rstrip=True),
        "single_word": definition(single_word=True),
        "bos_template": with_bos(definition()),
        "truncation_and_padding": cut_off,
    }


@pytest.fixture
def folder(tmp_path: Path, definitions: dict[str, dict[str, Any]]) -> Path:
    """A model folder with the byte-level tokenizer alone."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(definitions["byte_level"]), encoding="utf-8")
    return tmp_path
