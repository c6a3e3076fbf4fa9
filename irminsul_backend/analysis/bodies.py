"""One request body of a chat or completions API → messages of (role, text), the form in which traces hold them.

OpenAI's and Anthropic's bodies are read by the same code: their fields have different names or agree in meaning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from irminsul_traffic.traces import Message

from irminsul_backend.errors import InvalidRequestError

WRAPPERS = ("body", "request", "params")
"""Fields under which logs and batch files keep the request body itself."""
SESSION_FIELDS = ("session_id", "session", "conversation_id")
USER_FIELDS = ("user", "user_id")
KNOWN_ROLES = frozenset({"system", "developer", "tool_schema", "doc", "user", "assistant", "tool", "function"})
TEXT_TYPES = ("text", "input_text", "output_text")

Note = Callable[[str], None]
"""Takes a remark about something that was left out or not understood, though the rest of the body is used."""


def find_body(row: dict[str, Any]) -> dict[str, Any] | None:
    """The request body in a line of a log: the object itself or one of its `WRAPPERS`; None if neither is one."""
    for candidate in (row, *(row.get(name) for name in WRAPPERS)):
        if isinstance(candidate, dict) and ("messages" in candidate or "prompt" in candidate):
            return candidate
    return None


def session_key(row: dict[str, Any]) -> str | None:
    """What names the session in a line of a log: in the line, its body, or the metadata of either."""
    return _first(row, SESSION_FIELDS)


def user_key(row: dict[str, Any]) -> str | None:
    """What names the user, who may have many sessions."""
    return _first(row, USER_FIELDS)


def _first(row: dict[str, Any], names: tuple[str, ...]) -> str | None:
    for source in (row, find_body(row) or {}):
        metadata = source.get("metadata")
        for fields in (source, metadata if isinstance(metadata, dict) else {}):
            for value in map(fields.get, names):
                if isinstance(value, (str, int)) and not isinstance(value, bool) and value != "":
                    return str(value)
    return None


def parse_body(body: dict[str, Any], note: Note) -> list[list[Message]]:
    """The prompts of a request body, each a list of messages: one for a chat, one or more for completions.

    System text comes first, then one message of role `tool_schema` for each tool, then the conversation.

    Raises:
        InvalidRequestError: the body holds no prompt that can be read; says why.
    """
    if "messages" in body:
        return [_chat(body, note)]
    prompt = body["prompt"]
    prompts = prompt if isinstance(prompt, list) and prompt else [prompt]
    if not all(isinstance(text, str) and text for text in prompts):
        raise InvalidRequestError(f"prompt is {_kind(prompt)}; it must be a text, or a list of texts")
    return [[{"role": "user", "content": text}] for text in prompts]


def _chat(body: dict[str, Any], note: Note) -> list[Message]:
    rows = body["messages"]
    if not isinstance(rows, list) or not rows:
        raise InvalidRequestError(f"messages is {_kind(rows)}; it must be a list with at least one message")
    head: list[Message] = []
    if body.get("system"):
        head.append({"role": "system", "content": _text(body["system"], "system", note)})
    history: list[Message] = []
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get("role"), str) or not row["role"]:
            raise InvalidRequestError(f"messages[{number}] is {_kind(row)}; it must be an object with a role")
        history += _message(row, f"messages[{number}]", note)
    leading = 0
    while leading < len(history) and history[leading]["role"] in ("system", "developer"):
        leading += 1
    return [*head, *history[:leading], *_tools(body, note), *history[leading:]]


def _tools(body: dict[str, Any], note: Note) -> list[Message]:
    tools = body.get("tools") or body.get("functions") or []
    if not isinstance(tools, list):
        note(f"tools is {_kind(tools)} and was left out; it must be a list")
        return []
    return [{"role": "tool_schema", "content": _json(tool)} for tool in tools]


def _message(row: dict[str, Any], where: str, note: Note) -> list[Message]:
    """One message, and before it one of role `tool` for each result that it carries in blocks."""
    role, content = row["role"], row.get("content")
    messages: list[Message] = []
    if isinstance(content, list):
        for block in content:
            if isinstance(block, dict) and block.get("type") == "tool_result":
                result = _text(block.get("content") or "", f"{where}, tool_result", note)
                messages.append({"role": "tool", "content": result})
        content = [b for b in content if not (isinstance(b, dict) and b.get("type") == "tool_result")]
    text = _text(content, where, note) if content else ""
    calls = row.get("tool_calls") or ([row["function_call"]] if row.get("function_call") else [])
    if isinstance(calls, list):
        text = "\n".join([*([text] if text else []), *(_json(_function(call)) for call in calls)])
    if text or not messages:
        messages.append({"role": role, "content": text})
    return messages


def _function(call: Any) -> Any:
    """What the model wrote of a tool call: templates leave out its id."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return call["function"]
    return call


def _text(content: Any, where: str, note: Note) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}: content is {_kind(content)}; it must be a text or a list of parts")
    texts = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(block, str):
            texts.append(block)
        elif kind in TEXT_TYPES and isinstance(block.get("text"), str):
            texts.append(block["text"])
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            texts.append(block["thinking"])
        elif kind == "tool_use":
            texts.append(_json({"name": block.get("name"), "input": block.get("input")}))
        else:
            note(f"{where}: a part of type {str(kind)[:32]!r} was left out; only text and tool calls are read")
    return "\n".join(texts)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _kind(value: Any) -> str:
    """The type of a value, for messages: its text is somebody's prompt and stays out of them."""
    return "an empty list" if value == [] else f"of type {type(value).__name__}"
