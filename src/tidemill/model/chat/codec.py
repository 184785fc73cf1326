"""Messages to ids and ids to messages: the K3 chat codec over any vocabulary.

The order of a prompt is: tool declaration, thinking effort, the messages, tool choice, response format, generation
prefix. Nothing here knows engines or HTTP. BOS is never written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.core.errors import InputError
from tidemill.model.chat.grammar import (
    Marker,
    Segment,
    Segments,
    open_tag,
    order_tool_results,
    render_message,
    render_system,
    render_tools,
)
from tidemill.model.chat.messages import Message
from tidemill.model.chat.parser import StreamParser
from tidemill.model.chat.texts import EFFORTS, OWN_TEXTS, InstructionTexts
from tidemill.model.chat.tokenizer import Vocabulary, decode_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered.

    thinking         whether assistant turns have a think channel, all of them or none
    effort           `low`, `high` or `max`; empty takes the texts' default
    tool_choice      `auto`, `none` or `required` (a named tool is rendered as required)
    response_format  OpenAI's object, or None for text
    """

    thinking: bool = True
    effort: str = ""
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: str = "auto"
    response_format: Mapping[str, Any] | None = None
    generation_prefix: bool = True

    def __post_init__(self) -> None:
        if self.effort and self.effort not in EFFORTS:
            raise InputError(f"effort = {self.effort!r}: expected one of {', '.join(EFFORTS)}", field="effort")
        if self.tool_choice not in ("auto", "none", "required"):
            raise InputError(f"tool_choice = {self.tool_choice!r}: expected auto, none or required",
                             field="tool_choice")


def resolve_effort(reasoning_effort: str | None) -> tuple[bool, str]:
    """OpenAI's `reasoning_effort` as (thinking, effort). Raises InputError for values the model was not trained on."""
    if reasoning_effort is None:
        return True, ""
    if reasoning_effort == "none":
        return False, ""
    if reasoning_effort not in EFFORTS:
        raise InputError(f"reasoning_effort = {reasoning_effort!r}: expected none, {', '.join(EFFORTS)}",
                         field="reasoning_effort")
    return True, reasoning_effort


class ChatCodec:
    """The grammar bound to a vocabulary and its instruction texts. Immutable."""

    def __init__(self, vocabulary: Vocabulary, texts: InstructionTexts = OWN_TEXTS) -> None:
        self.vocabulary, self.texts = vocabulary, texts
        control = vocabulary.control
        self._markers = {Marker.OPEN: control.open, Marker.CLOSE: control.close, Marker.SEP: control.sep,
                         Marker.END_OF_MSG: control.end_of_msg}
        self.stop_ids: tuple[int, ...] = (control.end_of_msg, control.eos)
        """A turn ends at either."""

    def encode(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of segments. Each text is encoded on its own, with control tokens out of its reach."""
        ids: list[int] = []
        for segment in segments:
            if isinstance(segment, Marker):
                ids.append(self._markers[segment])
            elif segment:
                ids.extend(self.vocabulary.encode_text(segment))
        return ids

    def render(self, messages: Sequence[Message], options: ChatOptions) -> list[Segments]:
        """One list of segments per rendered message, in order; the last one is the generation prefix if wanted.

        A conversation that continues another one begins with the same lists, unless tools or effort changed.
        """
        texts, thinking = self.texts, options.thinking
        parts: list[Segments] = []
        if options.tools:
            parts.append(render_tools(texts.static_tools, options.tools))
        effort = texts.effort.get(options.effort or texts.default_effort, "")
        if thinking and effort:
            parts.append(render_system("thinking-effort", effort))
        index = 0
        for row in order_tool_results(messages):
            index = index + 1 if row.role == "tool" else 0
            parts.append(render_message(row, texts, thinking=thinking, tool_index=index))
        if options.tool_choice != "auto":
            body = texts.choice_required if options.tool_choice == "required" else texts.choice_none
            parts.append(render_system("tool-choice", body))
        form = self._format(options.response_format)
        if form:
            parts.append(render_system("response-format", form))
        if options.generation_prefix:
            parts.append(self.generation_prefix(thinking=thinking))
        return parts

    def prompt_ids(self, messages: Sequence[Message], options: ChatOptions | None = None) -> list[int]:
        """Ids of a whole conversation."""
        return [i for part in self.render(messages, options or ChatOptions()) for i in self.encode(part)]

    @staticmethod
    def generation_prefix(*, thinking: bool) -> Segments:
        """Opens the assistant's message and its first channel; sampled text starts inside that channel."""
        return [*open_tag("message", [("role", "assistant")]), *open_tag("think" if thinking else "response")]

    def parser(self, *, thinking: bool = True, hold_reasoning: bool = False) -> StreamParser:
        """A parser for what is sampled after the generation prefix."""
        return StreamParser(self.vocabulary, thinking=thinking, hold_reasoning=hold_reasoning)

    def describe(self, ids: Iterable[int]) -> str:
        """Ids as readable text, markers spelled out. For logs and people: ids cannot be had back from it."""
        return decode_ids(self.vocabulary, ids, control=True)

    def _format(self, wanted: Mapping[str, Any] | None) -> str:
        kind = "text" if wanted is None else wanted.get("type")
        if wanted is None or kind == "text":
            return ""
        if kind == "json_object":
            return self.texts.format_object
        schema = wanted.get("json_schema")
        inner = schema.get("schema") if isinstance(schema, Mapping) else None
        if kind != "json_schema" or not isinstance(inner, Mapping):
            raise InputError(f"response_format.type = {kind!r}: expected text, json_object, or json_schema with "
                             "json_schema.schema", field="response_format")
        listed = json.dumps(inner, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return f"{self.texts.format_schema}```json\n{listed}\n```"
