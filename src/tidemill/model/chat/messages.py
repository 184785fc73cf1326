"""Chat messages as data, and the one place where OpenAI-style dictionaries are checked and turned into them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn, cast

from tidemill.core.errors import InputError

Role = Literal["system", "user", "assistant", "tool"]
_ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
}

@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """A call the assistant made. `arguments` is the JSON text of an object, or whatever the caller sent."""

    name: str
    arguments: str
    id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message. Fields that do not belong to its role are empty.

    reasoning     content of the think channel (assistant)
    tool_calls    calls in order (assistant)
    tool_call_id  which call this answers; `name` is the tool's name then (tool)
    tools         tool declarations a system message adds
    """

    role: Role
    content: str = ""
    name: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()


def parse_messages(rows: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Check OpenAI chat messages. Raises InputError naming `messages[i].field`; unknown extra keys are ignored, as
    clients send back what they were sent."""
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Sequence):
        _refuse("messages", rows, "a list of messages")
    if not rows:
        _refuse("messages", rows, "at least one message")
    return tuple(_message(row, f"messages[{i}]") for i, row in enumerate(rows))


def parse_tools(rows: Sequence[Mapping[str, Any]] | None, where: str = "tools") -> tuple[Mapping[str, Any], ...]:
    """Check tool declarations of type `function`. Raises InputError."""
    if rows is None:
        return ()
    if isinstance(rows, (str, bytes)) or not isinstance(rows, Sequence):
        _refuse(where, rows, "a list of tools")
    for i, row in enumerate(rows):
        at = f"{where}[{i}]"
        if not isinstance(row, Mapping) or row.get("type", "function") != "function":
            _refuse(f"{at}.type", row, "a tool of type 'function'")
        function = row.get("function")
        if not isinstance(function, Mapping):
            _refuse(f"{at}.function", function, "an object with a name")
        if not isinstance(function.get("name"), str) or not function["name"]:
            _refuse(f"{at}.function.name", function.get("name"), "a non-empty string")
        if not isinstance(function.get("parameters", {}), Mapping):
            _refuse(f"{at}.function.parameters", function.get("parameters"), "a JSON schema")
        _check_text(json.dumps(row, ensure_ascii=False, default=str), at)
    return tuple(rows)


def _message(row: Mapping[str, Any], at: str) -> Message:
    if not isinstance(row, Mapping):
        _refuse(at, row, "an object")
    role = _ROLES.get(str(row.get("role")))
    if role is None:
        _refuse(f"{at}.role", row.get("role"), "one of " + ", ".join(_ROLES))
    reasoning = row.get("reasoning_content")
    if reasoning in (None, ""):
        reasoning = row.get("reasoning")
    calls = row.get("tool_calls") or ()
    if calls and role != "assistant":
        _refuse(f"{at}.tool_calls", calls, "tool calls in assistant messages only")
    if isinstance(calls, (str, bytes)) or not isinstance(calls, Sequence):
        _refuse(f"{at}.tool_calls", calls, "a list of calls")
    tools = parse_tools(row.get("tools"), f"{at}.tools")
    if tools and role != "system":
        _refuse(f"{at}.tools", role, "tools in system messages only")
    content = _content(row.get("content"), f"{at}.content")
    if tools and content:
        _refuse(f"{at}.content", content, "no content in a system message that declares tools")
    if row.get("content") is None and role != "assistant" and not tools:
        _refuse(f"{at}.content", None, "text")
    return Message(
        role=role, content=content, name=_text(row.get("name"), f"{at}.name"),
        reasoning=_text(reasoning, f"{at}.reasoning_content") if role == "assistant" else "",
        tool_calls=tuple(_call(call, f"{at}.tool_calls[{i}]") for i, call in enumerate(calls)),
        tool_call_id=_text(row.get("tool_call_id"), f"{at}.tool_call_id") if role == "tool" else "", tools=tools,
    )


def _call(row: Any, at: str) -> ToolCall:
    function = row.get("function") if isinstance(row, Mapping) else None
    if not isinstance(function, Mapping):
        _refuse(f"{at}.function", function, "an object with name and arguments")
    name = _text(function.get("name"), f"{at}.function.name")
    if not name:
        _refuse(f"{at}.function.name", name, "a non-empty string")
    arguments = function.get("arguments")
    if isinstance(arguments, Mapping):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return ToolCall(name=name, arguments=_text(arguments, f"{at}.function.arguments") or "{}",
                    id=_text(cast("Mapping[str, Any]", row).get("id"), f"{at}.id"))


def _content(value: Any, at: str) -> str:
    """Text, or a list of text parts joined."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        parts: list[str] = []
        for i, part in enumerate(value):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind != "text":
                _refuse(f"{at}[{i}].type", kind, "'text' (this model reads no images)")
            parts.append(_text(part.get("text"), f"{at}[{i}].text"))
        return "".join(parts)
    return _text(value, at)


def _text(value: Any, at: str) -> str:
    if value is None:
        return ""
    if not isinstance(value, str):
        _refuse(at, value, "a string")
    _check_text(value, at)
    return value


def _check_text(value: str, at: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        _refuse(at, value, "valid Unicode (it holds a lone surrogate)")


def _refuse(at: str, value: object, expected: str) -> NoReturn:
    shown = ascii(value)
    raise InputError(f"{at} = {shown if len(shown) <= 80 else shown[:79] + '…'}: expected {expected}", field=at)
