"""The K3 message grammar as segments: markers, and pieces of text that are each encoded on their own.

    elem    := <|open|>TAG( NAME="VALUE")*<|sep|> body <|close|>TAG<|sep|>
    message := elem(message, role[, ...]) <|end_of_msg|>

Text never becomes a marker, because the two are different types until each is an id. Source: K3 technical report.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any, cast

from tidemill.core.errors import InputError
from tidemill.model.chat.messages import Message, ToolCall
from tidemill.model.chat.texts import InstructionTexts


class Marker(Enum):
    """The four structural tokens."""

    OPEN = "<|open|>"
    CLOSE = "<|close|>"
    SEP = "<|sep|>"
    END_OF_MSG = "<|end_of_msg|>"


Segment = Marker | str
Segments = list[Segment]

ARGUMENT_TYPES = ("string", "number", "boolean", "null", "object", "array")
_HEADER = re.compile(r'([^\s"=]+)((?:\s+[^\s"=]+="[^"]*")*)\s*')
_ATTRIBUTE = re.compile(r'([^\s"=]+)="([^"]*)"')


def escape(value: str) -> str:
    """Attribute value as written."""
    return value.replace("&", "&amp;").replace('"', "&quot;")


def unescape(value: str) -> str:
    """Inverse of `escape`."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


def attribute(name: str, value: str) -> Segments:
    """` name`, `="`, value, `"`: four pieces."""
    return [f" {name}", '="', escape(value), '"']


def open_tag(tag: str, attributes: Iterable[tuple[str, str]] = ()) -> Segments:
    segments: Segments = [Marker.OPEN, tag]
    for name, value in attributes:
        segments += attribute(name, value)
    segments.append(Marker.SEP)
    return segments


def close_tag(tag: str) -> Segments:
    return [Marker.CLOSE, tag, Marker.SEP]


def element(tag: str, body: Segments, attributes: Iterable[tuple[str, str]] = ()) -> Segments:
    return [*open_tag(tag, attributes), *body, *close_tag(tag)]


def message(attributes: Sequence[tuple[str, str]], body: Segments) -> Segments:
    """A whole message with its end marker."""
    return [*element("message", body, attributes), Marker.END_OF_MSG]


def parse_header(text: str) -> tuple[str, dict[str, str]] | None:
    """Tag and attributes of what stands between a marker and its separator; None if it is malformed or names an
    attribute twice."""
    found = _HEADER.fullmatch(text)
    if found is None:
        return None
    pairs = [(m[1], unescape(m[2])) for m in _ATTRIBUTE.finditer(found[2])]
    attributes = dict(pairs)
    return (found[1], attributes) if len(attributes) == len(pairs) else None


def render_system(kind: str, body: str) -> Segments:
    """A message the codec writes itself."""
    return message([("role", "system"), ("type", kind)], [body])


def render_tools(prefix: str, tools: Sequence[Mapping[str, Any]]) -> Segments:
    """A declaration of tools: keys sorted at every depth, compact, in a fenced JSON block."""
    listed = json.dumps(list(tools), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return render_system("tool-declare", f"{prefix}{listed}\n```")


def render_message(row: Message, texts: InstructionTexts, *, thinking: bool, tool_index: int = 1) -> Segments:
    """One message. `tool_index` is the 1-based place of a tool result in its run."""
    named = [("name", row.name)] if row.name and row.role != "tool" else []
    if row.role == "tool":
        return render_tool_result(row.name, row.content, tool_index)
    if row.role == "assistant":
        return message([("role", "assistant"), *named], assistant_body(row, thinking=thinking))
    if row.tools:
        return render_tools(texts.dynamic_tools, row.tools)
    return message([("role", row.role), *named], [row.content])


def render_tool_result(tool: str, content: str, index: int) -> Segments:
    """The result of one call; `index` is its 1-based place in the run of results."""
    return message([("role", "tool"), ("tool", tool), ("index", str(index))], [content])


def assistant_body(row: Message, *, thinking: bool) -> Segments:
    """Channels: think (thinking mode only, blank reasoning is empty), response, tools if there are calls."""
    body: Segments = []
    if thinking:
        body += element("think", [row.reasoning if row.reasoning.strip() else ""])
    body += element("response", [row.content])
    if row.tool_calls:
        calls: Segments = []
        for index, call in enumerate(row.tool_calls, 1):
            calls += render_call(call, index)
        body += element("tools", calls)
    return body


def render_call(call: ToolCall, index: int) -> Segments:
    """One call. Arguments that are not JSON are carried raw; JSON that is no object raises InputError."""
    body: Segments = []
    try:
        arguments = json.loads(call.arguments, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        body = element("json", [call.arguments], [("type", "object")])
    else:
        if not isinstance(arguments, dict):
            raise InputError(f"the arguments of call {call.name!r} are {type(arguments).__name__}, expected an object",
                             field="tool_calls")
        for key, value in cast("dict[str, Any]", arguments).items():
            kind = argument_type(value)
            text = value if kind == "string" else json.dumps(value, ensure_ascii=False)
            body += element("argument", [text], [("key", key), ("type", kind)])
    return element("call", body, [("tool", call.name), ("index", str(index))])


def argument_type(value: Any) -> str:
    """The grammar's name for a JSON value's type."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, (int, float)):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, (list, tuple)) else "object"


def argument_value(text: str, kind: str) -> Any:
    """Inverse: strings are raw; anything else is JSON of that type, or the raw text if it is not."""
    if kind == "string":
        return text
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return text
    return value if argument_type(value) == kind else text


def order_tool_results(rows: Sequence[Message]) -> list[Message]:
    """Put each run of tool results into the order of the calls before it and give them the calls' names. A run with an
    unmatched id stays as it is. Raises InputError for a result that then has no tool name."""
    ordered: list[Message] = []
    at = 0
    calls: dict[str, tuple[int, str]] = {}
    while at < len(rows):
        row = rows[at]
        if row.role != "tool":
            if row.role == "assistant":
                calls = {c.id: (i, c.name) for i, c in enumerate(row.tool_calls) if c.id}
            else:
                calls = {}
            ordered.append(row)
            at += 1
            continue
        end = at
        while end < len(rows) and rows[end].role == "tool":
            end += 1
        run = list(rows[at:end])
        if all(r.tool_call_id in calls for r in run):
            run.sort(key=lambda r: calls[r.tool_call_id][0])
            run = [_named(r, calls[r.tool_call_id][1]) for r in run]
        for i, r in enumerate(run):
            if not r.name:
                raise InputError(
                    f"messages[{at + i}].tool_call_id = {r.tool_call_id!r}: it matches no call of the assistant "
                    "before, and there is no name", field=f"messages[{at + i}].tool_call_id",
                    remedy="Send the assistant message that made the call, or the tool's name.",
                )
        ordered += run
        at = end
    return ordered


def _named(row: Message, name: str) -> Message:
    return Message(role="tool", content=row.content, name=name, tool_call_id=row.tool_call_id)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")
