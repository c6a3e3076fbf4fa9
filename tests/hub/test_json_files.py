"""JSON files of a model folder: what is read, and how a wrong one is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul_backend.errors import UnsupportedModelError
from irminsul_backend.hub.json_files import (
    MAX_DEPTH,
    parse_json,
    read_config,
    read_json,
    read_optional_json,
    read_text,
    shown,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
)


@given(JSON)
def test_parse_json_reads_what_the_standard_library_writes(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value


@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_nesting_has_a_limit(brackets: str) -> None:
    opening, closing = brackets[:-1], brackets[-1]

    def nested(depth: int) -> str:
        return opening * depth + "0" + closing * depth

    parse_json(nested(MAX_DEPTH))
    for depth in (MAX_DEPTH + 2, 1000, 1_000_000):
        with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} deep"):
            parse_json(nested(depth))


def test_a_missing_file_says_what_it_is_for(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"config\.json is missing: it describes the model"):
        read_config(tmp_path)
    assert read_optional_json(tmp_path / "config.json") == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\xff\xfe", "cannot be read"),
        (b"{", "is not valid JSON"),
        (b"", "is not valid JSON"),
        (b"[1]", "must hold a JSON object, not list"),
        (b"null", "must hold a JSON object, not NoneType"),
    ],
)
def test_a_damaged_file_is_named_with_its_fault(tmp_path: Path, content: bytes, said: str) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    for read in (lambda: read_json(path, "it describes the model"), lambda: read_optional_json(path)):
        with pytest.raises(UnsupportedModelError, match=said) as caught:
            read()
        assert str(path) in str(caught.value)


def test_a_folder_in_the_place_of_a_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="cannot be read"):
        read_text(tmp_path, "it holds a chat template")


def test_shown_is_short_and_on_one_line() -> None:
    assert shown("a\nb") == r"'a\nb'"
    long = shown("x" * 10_000_000)
    assert len(long) < 140 and "10000002 characters" in long
