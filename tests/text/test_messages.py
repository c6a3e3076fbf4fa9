"""Messages and tools: what is taken, and what a refusal says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from irminsul_backend.errors import InvalidRequestError
from irminsul_backend.text.messages import parse_messages, parse_tools

USER = {"role": "user", "content": "hi"}


def test_other_keys_are_kept() -> None:
    messages = [{"role": "tool", "content": "", "tool_call_id": "x", "name": "f"}]
    assert parse_messages(json.dumps(messages)) == messages


def test_other_keys_that_are_null_are_left_out() -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": None, "refusal": None, "name": "", "parsed": False}
    assert parse_messages(json.dumps([message])) == [{"role": "assistant", "content": "x", "name": "", "parsed": False}]


def test_content_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert parse_messages(json.dumps([{"role": "user", "content": parts}]))[0]["content"] == "a\nb"


@pytest.mark.parametrize("message", [{"role": "assistant"}, {"role": "assistant", "content": None}])
def test_content_may_be_null_beside_tool_calls(message: dict[str, Any]) -> None:
    message = {**message, "tool_calls": [{"function": {"name": "f"}}]}
    assert parse_messages(json.dumps([message]))[0]["content"] is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "messages is not valid JSON: Expecting value: line 1 column 1 (char 0)"),
        ("[{]", "messages is not valid JSON: Expecting property name enclosed in double quotes: line 1 column 3"),
        ("[" * 100_000, "messages cannot be read as JSON: maximum recursion depth"),
        ("[" + "9" * 5000 + "]", "messages cannot be read as JSON: Exceeds the limit"),
        ("{}", "messages is an object; it must be a JSON list of objects"),
        ('"hi"', "messages is a string; it must be a JSON list of objects"),
        ("null", "messages is null; it must be a JSON list of objects"),
        ("[]", "messages is an empty list; it must hold at least one message"),
        ([USER, "x"], 'messages[1] is a string; it must be an object with "role" and "content"'),
        ([USER, None], 'messages[1] is null; it must be an object with "role" and "content"'),
        ([USER, {"content": "x"}], 'messages[1]["role"] is missing; it must be a non-empty string'),
        ([{"role": "", "content": "x"}], 'messages[0]["role"] is an empty string; it must be a non-empty string'),
        ([{"role": 3, "content": "x"}], 'messages[0]["role"] is a number; it must be a non-empty string'),
        ([{"role": "user"}], 'messages[0]["content"] is missing; it must be a string or a list of text parts'),
        ([{"role": "user", "content": None}], 'messages[0]["content"] is null; it must be a string'),
        ([{"role": "user", "content": True}], 'messages[0]["content"] is a boolean; it must be a string'),
        ([{"role": "user", "content": {"a": 1}}], 'messages[0]["content"] is an object; it must be a string'),
        ([{"role": "user", "content": ["x"]}], 'messages[0]["content"][0] is a string; it must be {"type": "text"'),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}],
            "messages[0][\"content\"][1] is of type 'image_url'; it must be",
        ),
        (
            [{"role": "assistant", "content": None, "tool_calls": {"name": "f"}}],
            'messages[0]["tool_calls"] is an object; it must be a list',
        ),
    ],
)
def test_bad_messages(text: Any, said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse_messages(text if isinstance(text, str) else json.dumps(text))
    assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("nope", "tools is not valid JSON"),
        ("{}", "tools is an object; it must be a JSON list of objects"),
        ("[{}, 1.5]", "tools[1] is a number; it must be an object"),
    ],
)
def test_bad_tools(text: str, said: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        parse_tools(text)
    assert str(error.value).startswith(said)


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "tool_calls"]), inner, max_size=4)
    ),
    max_leaves=12,
)


@given(json_values)
def test_any_json_is_read_or_refused(value: Any) -> None:
    try:
        messages = parse_messages(json.dumps(value))
    except InvalidRequestError:
        return
    assert all(isinstance(message["role"], str) for message in messages)
    assert all(message["content"] is None or isinstance(message["content"], str) for message in messages)
