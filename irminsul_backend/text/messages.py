"""Parsing of chat messages and tools: JSON as clients send it, to the form that chat templates expect."""

from __future__ import annotations

import json
from typing import Any

from irminsul_backend.errors import InvalidRequestError, shown


def parse_messages(text: str) -> list[dict[str, Any]]:
    """Parse a JSON list of messages.

    Each is an object with "role" (a non-empty string) and "content": a string; a list of text parts, which are joined
    by newlines; or null beside "tool_calls". Other keys are passed to the template unchanged, except null ones: clients
    send every field they know, and templates test whether a field is present.

    Raises:
        InvalidRequestError: anything else; the message gives the index and what was expected.
    """
    messages = _parse_list("messages", text)
    if not messages:
        raise InvalidRequestError("messages is an empty list; it must hold at least one message")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise InvalidRequestError(f'{where} is {_kind(message)}; it must be an object with "role" and "content"')
        role = message.get("role")
        if not isinstance(role, str) or not role:
            raise InvalidRequestError(f'{where}["role"] {_found(message, "role")}; it must be a non-empty string')
        calls = message.get("tool_calls")
        if calls is not None and not isinstance(calls, list):
            raise InvalidRequestError(f'{where}["tool_calls"] is {_kind(calls)}; it must be a list')
        message["content"] = _content(where, message, optional=bool(calls))
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in messages]


def parse_tools(text: str) -> list[dict[str, Any]]:
    """Parse a JSON list of tool schemas, each an object; raises InvalidRequestError for anything else."""
    tools = _parse_list("tools", text)
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InvalidRequestError(f"tools[{index}] is {_kind(tool)}; it must be an object")
    return tools


def _content(where: str, message: dict[str, Any], optional: bool) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and optional):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(
            f'{where}["content"] {_found(message, "content")}; it must be a string or a list of text parts '
            "(null only beside tool_calls)"
        )
    for index, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            kind = f"of type {shown(part.get('type'))}" if isinstance(part, dict) else _kind(part)
            raise InvalidRequestError(
                f'{where}["content"][{index}] is {kind}; it must be {{"type": "text", "text": "..."}}, '
                "the model reads text only"
            )
    return "\n".join(part["text"] for part in content)


def _parse_list(name: str, text: str) -> list[Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise InvalidRequestError(f"{name} is not valid JSON: {error}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of nested lists
        raise InvalidRequestError(f"{name} cannot be read as JSON: {error}") from error
    if not isinstance(value, list):
        raise InvalidRequestError(f"{name} is {_kind(value)}; it must be a JSON list of objects")
    return value


def _found(message: dict[str, Any], key: str) -> str:
    if key not in message:
        return "is missing"
    return "is an empty string" if message[key] == "" else f"is {_kind(message[key])}"


def _kind(value: Any) -> str:
    """Return the JSON name of a value's type, with an article."""
    if value is None:
        return "null"
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names[type(value)]
