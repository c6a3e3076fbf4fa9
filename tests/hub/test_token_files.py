"""Tokenizer and template files of a model folder, as publishers write them and as downloads damage them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.template_files import read_templates, sorts_tool_keys
from irminsul_backend.hub.tokenizer_files import (
    added_tokens,
    named_tokens,
    read_end_ids,
    read_ranks,
    read_tokenizer_config,
    special_tokens,
)


def write(folder: Path, **files: Any) -> Path:
    for name, value in files.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return folder


def test_end_ids_come_from_both_files_in_order(tmp_path: Path) -> None:
    assert read_end_ids(tmp_path) == []
    write(tmp_path, generation_config={"eos_token_id": [3, 1]}, config={"eos_token_id": 2})
    assert read_end_ids(tmp_path) == [3, 1, 2]
    write(tmp_path, generation_config={"eos_token_id": None})
    assert read_end_ids(tmp_path) == [2]


@pytest.mark.parametrize("value", ["2", -1, True, [1, None], 2**31, {"id": 1}])
def test_a_wrong_end_id_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"eos_token_id in .*config\.json is"):
        read_end_ids(write(tmp_path, config={"eos_token_id": value}))


def test_ranks_are_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "tiktoken.model"
    ranks = {b"a": 0, b"\xff": 1, b"ab": 2}
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in ranks.items()]
    path.write_text("\n".join(lines[:2]) + "\n\n" + lines[2] + "\r\n")
    assert read_ranks(path) == ranks


@pytest.mark.parametrize("line", ["YQ==", "YQ== x", "!! 1", "YQ== 1 2"])
def test_a_wrong_rank_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tiktoken.model"
    path.write_text(f"YQ== 0\n{line}\n")
    with pytest.raises(UnsupportedModelError, match="line 2 is"):
        read_ranks(path)
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        read_ranks(tmp_path / "absent")


def test_special_tokens_are_texts_objects_or_nothing() -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "pad_token": None,
        "additional_special_tokens": ["<|user|>", {"content": "<|end|>"}, "</s>"],
    }
    assert special_tokens(config) == {"bos_token": "<s>", "eos_token": "</s>"}
    assert named_tokens(config) == ["<s>", "</s>", "<|user|>", "<|end|>"]
    assert named_tokens({"extra_special_tokens": {"image": "<|image|>"}}) == ["<|image|>"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"added_tokens_decoder": ["<s>"]}, "must be an object"),
        ({"added_tokens_decoder": {"x": {"content": "<s>"}}}, "must map ids"),
        ({"added_tokens_decoder": {"1": {}}}, "must map ids"),
        ({"added_tokens_decoder": {"1000001": {"content": "<s>"}}}, "at most 1,000,000"),
        ({"added_tokens_decoder": {"9" * 5000: {"content": "<s>"}}}, "at most 1,000,000"),
        ({"added_tokens_decoder": {"1": {"content": "<s>", "special": "yes"}}}, "must be true or false"),
        ({"extra_special_tokens": "<s>"}, "must be a list"),
    ],
)
def test_a_wrong_token_is_named_with_its_file(tmp_path: Path, config: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said) as caught:
        read_tokenizer_config(write(tmp_path, tokenizer_config=config))
    assert "tokenizer_config.json is not understood" in str(caught.value) and len(str(caught.value)) < 500


def test_added_tokens_by_id() -> None:
    entry = {"content": "<s>", "special": True}
    assert added_tokens({"added_tokens_decoder": {"7": entry}}) == {7: entry}
    assert added_tokens({}) == {}


def test_templates_of_the_first_place_that_has_some(tmp_path: Path) -> None:
    assert read_templates(tmp_path) == {}
    write(tmp_path, chat_template={"chat_template": "third"})
    assert read_templates(tmp_path) == {"default": "third"}
    write(tmp_path, tokenizer_config={"chat_template": [{"name": "default", "template": "second"}]})
    assert read_templates(tmp_path) == {"default": "second"}
    write(tmp_path, tokenizer_config={"chat_template": {"default": "second", "tool_use": "tools"}})
    assert read_templates(tmp_path) == {"default": "second", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("first")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("more")
    assert read_templates(tmp_path) == {"rag": "more", "default": "first"}


@pytest.mark.parametrize("value", [1, ["text"], [{"name": "default"}], {"default": 1}, [{"name": 1, "template": "x"}]])
def test_a_wrong_template_is_named(tmp_path: Path, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"chat_template in .*tokenizer_config\.json must be"):
        read_templates(write(tmp_path, tokenizer_config={"chat_template": value}))


def test_only_the_tokenizers_own_code_sorts_the_keys_of_tools(tmp_path: Path) -> None:
    config = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    assert not sorts_tool_keys(tmp_path, config)
    (tmp_path / "tokenization_kimi.py").write_text("tools = deep_sort_dict(tools)")
    assert sorts_tool_keys(tmp_path, config)
    assert not any(sorts_tool_keys(tmp_path, other) for other in ({}, {"auto_map": "x"}, {"auto_map": {}}))
