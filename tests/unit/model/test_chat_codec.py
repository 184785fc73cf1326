"""Codec: id structure of the released vocabulary, the grammar's table, bad input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.errors import ConfigError, InputError
from tidemill.model.chat import (
    OWN_TEXTS,
    ChatCodec,
    ChatOptions,
    InstructionTexts,
    Message,
    ParsedCall,
    TiktokenVocabulary,
    Vocabulary,
    build_tokenizer,
    parse_messages,
    parse_tools,
    resolve_effort,
)
from tidemill.model.chat.control import K3_CONTROL, K3_IDS, ControlIds
from tidemill.model.chat.grammar import ARGUMENT_TYPES, argument_type, argument_value, escape, unescape

TOKENIZER = build_tokenizer()
CODEC = ChatCodec(TOKENIZER)
BARE = ChatOptions(generation_prefix=False)


PUBLISHED = {
    "message": [2778], " role": [6244], '="': [878], '"': [1], "user": [2482], "assistant": [69702], "think": [39964],
    "response": [12092], "Hi": [18699], "because": [47221], "q1": [80, 16], "a1": [64, 16], "q2": [80, 17],
}


class PublishedIds:
    """A vocabulary that knows the published ids of a few pieces of text and refuses any other."""

    control: ControlIds = K3_CONTROL
    size = 163_840

    def encode_text(self, text: str) -> list[int]:
        return PUBLISHED[text]

    def token_bytes(self, token_id: int) -> bytes:
        return b"x"

    def token_name(self, token_id: int) -> str:
        return ""


K3 = ChatCodec(PublishedIds(), InstructionTexts(
    static_tools="", dynamic_tools="", choice_required="", choice_none="", format_object="", format_schema=""))

HI = "163587 2778 6244 878 2482 1 163589 18699 163588 2778 163589 163586"
SUFFIX = "163587 2778 6244 878 69702 1 163589 163587 39964 163589"
DIALOGUE = (
    "163587 2778 6244 878 2482 1 163589 80 16 163588 2778 163589 163586 "
    "163587 2778 6244 878 69702 1 163589 163587 39964 163589 47221 163588 39964 163589 163587 12092 163589 64 16 "
    "163588 12092 163589 163588 2778 163589 163586 "
    "163587 2778 6244 878 2482 1 163589 80 17 163588 2778 163589 163586 "
)


def ids(text: str) -> list[int]:
    return [int(i) for i in text.split()]


def user(content: str = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def shown(rows: list[dict[str, Any]], **options: Any) -> str:
    options.setdefault("generation_prefix", False)
    return CODEC.describe(CODEC.prompt_ids(parse_messages(rows), ChatOptions(**options)))


# -- published vectors ------------------------------------------------------------------------------------------------


def test_published_ids_of_one_user_message() -> None:
    rows = parse_messages([user()])
    assert K3.prompt_ids(rows, BARE) == ids(HI)
    assert K3.prompt_ids(rows) == ids(HI) + ids(SUFFIX)
    assert len(K3.prompt_ids(rows)) == 22


def test_published_ids_without_thinking() -> None:
    found = K3.prompt_ids(parse_messages([user()]), ChatOptions(thinking=False))
    assert found == ids(HI) + ids(SUFFIX.replace("39964", "12092"))


def test_an_empty_reasoning_content_gives_way_to_its_alias() -> None:
    (row,) = parse_messages([{"role": "assistant", "content": "a", "reasoning_content": "", "reasoning": "why"}])
    assert row.reasoning == "why"


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content"])
def test_published_ids_of_a_dialogue_with_preserved_thinking(field: str) -> None:
    rows = parse_messages([user("q1"), {"role": "assistant", "content": "a1", field: "because"}, user("q2")])
    assert K3.prompt_ids(rows) == ids(DIALOGUE) + ids(SUFFIX)


def test_stop_ids_are_both_ends() -> None:
    assert K3.stop_ids == (163586, 163585)


def test_texts_are_recognised_by_digest_only() -> None:
    assert not OWN_TEXTS.is_published()


# -- the grammar ------------------------------------------------------------------------------------------------------


def test_roles_and_names() -> None:
    assert shown([{"role": "developer", "content": "a", "name": "boss"}, user("b")]) == (
        '<|open|>message role="system" name="boss"<|sep|>a<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>b<|close|>message<|sep|><|end_of_msg|>')


def test_assistant_without_thinking_has_no_think_channel_anywhere() -> None:
    text = shown([user(), {"role": "assistant", "content": "a", "reasoning": "r"}, user()], thinking=False,
                 generation_prefix=True)
    assert "think" not in text
    assert text.endswith('role="assistant"<|sep|><|open|>response<|sep|>')


@pytest.mark.parametrize("reasoning", ["", " \n", None])
def test_blank_reasoning_is_an_empty_channel(reasoning: str | None) -> None:
    text = shown([user(), {"role": "assistant", "content": "a", "reasoning": reasoning}])
    assert "<|open|>think<|sep|><|close|>think<|sep|><|open|>response<|sep|>a<|close|>response<|sep|>" in text


def call(name: str, arguments: Any, call_id: str = "") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_calls_and_argument_types() -> None:
    arguments = '{"code": "a\\"b", "n": 1.5, "i": 2, "l": [1, "é"], "o": {"a": 1}, "z": null, "t": true}'
    text = shown([user(), {"role": "assistant", "content": None, "tool_calls": [call("python", arguments),
                                                                                call("sh", "{}")]}])
    assert (
        '<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="python" index="1"<|sep|>'
        '<|open|>argument key="code" type="string"<|sep|>a"b<|close|>argument<|sep|>'
        '<|open|>argument key="n" type="number"<|sep|>1.5<|close|>argument<|sep|>'
        '<|open|>argument key="i" type="number"<|sep|>2<|close|>argument<|sep|>'
        '<|open|>argument key="l" type="array"<|sep|>[1, "é"]<|close|>argument<|sep|>'
        '<|open|>argument key="o" type="object"<|sep|>{"a": 1}<|close|>argument<|sep|>'
        '<|open|>argument key="z" type="null"<|sep|>null<|close|>argument<|sep|>'
        '<|open|>argument key="t" type="boolean"<|sep|>true<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="sh" index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>'
    ) in text


@pytest.mark.parametrize("raw", ["{not json", '{"a": NaN}', "[" * 100_000])
def test_arguments_that_are_no_json_are_carried_raw(raw: str) -> None:
    text = shown([user(), {"role": "assistant", "content": "", "tool_calls": [call("python", raw)]}])
    assert f'<|open|>json type="object"<|sep|>{raw}<|close|>json<|sep|>' in text


@pytest.mark.parametrize("raw", ["[1]", "3", "null", '"x"'])
def test_arguments_that_are_no_object_are_refused(raw: str) -> None:
    with pytest.raises(InputError, match="expected an object"):
        shown([user(), {"role": "assistant", "content": "", "tool_calls": [call("python", raw)]}])


def tool(content: str, call_id: str, **extra: str) -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id, **extra}


TWO_CALLS = {"role": "assistant", "content": "", "tool_calls": [call("python", "{}", "x"), call("sh", "{}", "y")]}


def test_tool_results_follow_the_order_of_the_calls_which_name_them() -> None:
    text = shown([user(), TWO_CALLS, tool("of y", "y", name="wrong"), tool("of x", "x"), user("next")])
    first, second = '<|open|>message role="tool" tool="python" index="1"<|sep|>of x', 'tool="sh" index="2"<|sep|>of y'
    assert 0 < text.index(first) < text.index(second)


def test_a_run_with_an_unmatched_id_stays_as_it_is() -> None:
    text = shown([user(), TWO_CALLS, tool("of y", "y", name="sh"), tool("of z", "z", name="zsh")])
    assert text.index('tool="sh" index="1"<|sep|>of y') < text.index('tool="zsh" index="2"<|sep|>of z')


def test_a_result_of_an_unknown_call_without_a_name_is_refused() -> None:
    with pytest.raises(InputError, match=r"messages\[2\]\.tool_call_id"):
        shown([user(), TWO_CALLS, tool("of z", "z")])


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"z": {"b": 1, "a": "é"}}}}
TOOL_JSON = '[{"function":{"name":"f","parameters":{"z":{"a":"é","b":1}}},"type":"function"}]'


def test_tools_are_declared_first_and_sorted_at_every_depth() -> None:
    text = shown([user()], tools=parse_tools([TOOL]), effort="low")
    start = '<|open|>message role="system" type="tool-declare"<|sep|>'
    effort = 'type="thinking-effort"<|sep|>Thinking effort: low.'
    assert text.startswith(f"{start}{OWN_TEXTS.static_tools}{TOOL_JSON}\n```<|close|>message")
    assert text.index("tool-declare") < text.index(effort) < text.index("Hi")


def test_a_system_message_can_add_tools() -> None:
    text = shown([user(), {"role": "system", "tools": [TOOL]}])
    assert f'type="tool-declare"<|sep|>{OWN_TEXTS.dynamic_tools}{TOOL_JSON}\n```<|close|>' in text


def test_effort_is_written_in_thinking_mode_only() -> None:
    assert "thinking-effort" not in shown([user()], thinking=False, effort="max")
    assert "thinking-effort" not in shown([user()])


def test_choice_and_format_stand_between_messages_and_prefix() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"b": 1, "a": 2}}}
    text = shown([user()], tool_choice="required", response_format=schema, generation_prefix=True)
    order = ["Hi", f'type="tool-choice"<|sep|>{OWN_TEXTS.choice_required}', 'type="response-format"',
             '```json\n{"a":2,"b":1}\n```', 'role="assistant"']
    assert [text.index(o) for o in order] == sorted(text.index(o) for o in order)
    assert OWN_TEXTS.format_object in shown([user()], response_format={"type": "json_object"})
    assert shown([user()], response_format={"type": "text"}) == shown([user()])


def test_a_longer_conversation_begins_with_the_shorter_one() -> None:
    rows = parse_messages([user(), TWO_CALLS, tool("a", "x"), tool("b", "y"), {"role": "assistant", "content": "z"}])
    whole = CODEC.render(rows, BARE)
    for n in (1, 2, 4, 5):
        assert whole[:n] == CODEC.render(rows[:n], BARE)


# -- text stays text --------------------------------------------------------------------------------------------------

HOSTILE = st.lists(st.one_of(st.sampled_from([
    *K3_IDS, "<|reserved_token_163592|>", "<|open|", "|>", "<|", "message", "response", "think", ' role="system"', '"',
    "&quot;", "&amp;", "&", "a", " ", "\n", "```", "\\", "{", "}",
]), st.text(st.characters(exclude_categories=("Cs",)), max_size=4)), max_size=6).map("".join)
FIELDS = ("system", "name", "user", "reasoning", "content", "tool", "key", "value", "item", "raw", "result",
          "tool_name", "declared", "described", "property", "added", "schema")
PLAIN = {name: f"plain{i}" for i, name in enumerate(FIELDS)}
BYTES_ONLY = TiktokenVocabulary({bytes([b]): b for b in range(256)})


def conversation(texts: Mapping[str, str]) -> tuple[tuple[Message, ...], ChatOptions]:
    """A conversation with each text in its own field; names are never empty."""
    arguments = {"k" + texts["key"]: texts["value"], "list": [texts["item"], {texts["item"]: 1}]}
    rows = parse_messages([
        {"role": "developer", "content": texts["system"], "name": "n" + texts["name"]},
        {"role": "system", "tools": [{"type": "function", "function": {
            "name": "f" + texts["added"], "parameters": {texts["property"]: {"description": texts["added"]}}}}]},
        {"role": "user", "content": texts["user"], "name": "n" + texts["name"]},
        {"role": "assistant", "content": texts["content"], "reasoning_content": "r" + texts["reasoning"],
         "tool_calls": [call("t" + texts["tool"], json.dumps(arguments), "x"),
                        call("u" + texts["tool"], "{not json" + texts["raw"], "y")]},
        tool(texts["result"], "y"), tool(texts["result"], "x"),
        {"role": "assistant", "content": texts["content"], "reasoning": "r" + texts["reasoning"]},
        tool(texts["result"], "none", name="t" + texts["tool_name"]),
    ])
    declared = parse_tools([{"type": "function", "function": {
        "name": "f" + texts["declared"], "description": texts["described"],
        "parameters": {"type": "object", "properties": {texts["property"]: {"enum": [texts["described"]]}}}}}])
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {texts["schema"]: texts["schema"]}}}
    return rows, ChatOptions(tools=declared, effort="high", tool_choice="required", response_format=form)


@pytest.mark.parametrize("vocabulary", [TOKENIZER, BYTES_ONLY], ids=["own", "tiktoken"])
@given(st.fixed_dictionaries(dict.fromkeys(FIELDS, HOSTILE)))
def test_no_text_in_any_field_adds_a_control_id(vocabulary: Vocabulary, texts: dict[str, str]) -> None:
    codec = ChatCodec(vocabulary)

    def control(wanted: Mapping[str, str]) -> list[int]:
        rows, options = conversation(wanted)
        return [i for i in codec.prompt_ids(rows, options) if vocabulary.token_name(i)]

    assert control(texts) == control(PLAIN)
    rows, options = conversation(texts)
    for segment in (s for part in codec.render(rows, options) for s in part if isinstance(s, str)):
        assert b"".join(vocabulary.token_bytes(i) for i in codec.encode([segment])).decode() == segment


@given(st.fixed_dictionaries(dict.fromkeys(FIELDS, HOSTILE)))
def test_what_was_written_can_be_read_back(texts: dict[str, str]) -> None:
    """The assistant's message, parsed as if it had just been sampled."""
    rows, _ = conversation(texts)
    whole = CODEC.prompt_ids(rows[3:4], BARE)
    prefix = CODEC.encode(CODEC.generation_prefix(thinking=True))
    parser = CODEC.parser()
    parser.push(whole[len(prefix):])
    found = parser.message
    assert (found.content, found.reasoning, found.stray) == (texts["content"], "r" + texts["reasoning"], "")
    first = found.calls[0]
    assert isinstance(first, ParsedCall)
    assert (first.name, dict(first.arguments)) == (
        "t" + texts["tool"], {"k" + texts["key"]: texts["value"], "list": [texts["item"], {texts["item"]: 1}]})


def test_a_lone_surrogate_inside_arguments_is_refused() -> None:
    with pytest.raises(InputError, match="surrogate"):
        shown([user(), {"role": "assistant", "content": "", "tool_calls": [call("f", '{"a": "\\ud800"}')]}])


@given(HOSTILE)
def test_attribute_escaping_round_trips_and_hides_quotes(text: str) -> None:
    assert unescape(escape(text)) == text
    assert '"' not in escape(text)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
                    | st.text(st.characters(exclude_categories=("Cs",)), max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab", max_size=2), inner),
                    max_leaves=6)


@given(JSON)
def test_typed_values_round_trip(value: Any) -> None:
    kind = argument_type(value)
    assert kind in ARGUMENT_TYPES
    assert argument_value(value if kind == "string" else json.dumps(value, ensure_ascii=False), kind) == value


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "field"), [
    ([], "messages"), ("hello", "messages"), ([3], r"messages\[0\]"), ([{"content": "x"}], r"messages\[0\]\.role"),
    ([{"role": "robot", "content": "x"}], r"messages\[0\]\.role"), ([{"role": "user"}], r"messages\[0\]\.content"),
    ([{"role": "user", "content": 3}], r"messages\[0\]\.content"),
    ([user(), {"role": "user", "content": [{"type": "image_url"}]}], r"messages\[1\]\.content\[0\]\.type"),
    ([{"role": "user", "content": "\ud800"}], r"messages\[0\]\.content"),
    ([{"role": "user", "content": "x", "tool_calls": [call("f", "{}")]}], r"messages\[0\]\.tool_calls"),
    ([{"role": "assistant", "tool_calls": [{"function": {"arguments": "{}"}}]}],
     r"messages\[0\]\.tool_calls\[0\]\.function\.name"),
    ([{"role": "assistant", "tool_calls": [{}]}], r"messages\[0\]\.tool_calls\[0\]\.function"),
    ([{"role": "user", "content": "x", "tools": [TOOL]}], r"messages\[0\]\.tools"),
    ([{"role": "system", "content": "x", "tools": [TOOL]}], r"messages\[0\]\.content"),
    ([{"role": "system", "tools": [{"type": "web"}]}], r"messages\[0\]\.tools\[0\]\.type"),
])
def test_bad_messages_are_refused_by_field(rows: Any, field: str) -> None:
    with pytest.raises(InputError, match=field) as error:
        parse_messages(rows)
    assert error.value.field


@pytest.mark.parametrize("rows", ["x", [{"type": "function"}], [{"function": {"name": ""}}],
                                  [{"function": {"name": "f", "parameters": 3}}]])
def test_bad_tools_are_refused(rows: Any) -> None:
    with pytest.raises(InputError, match="tools"):
        parse_tools(rows)


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (row,) = parse_messages([{"role": "user", "content": parts}])
    assert row.content == "ab"


@pytest.mark.parametrize("options", [{"effort": "medium"}, {"tool_choice": "always"}])
def test_bad_options_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(InputError, match=next(iter(options))):
        ChatOptions(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [{"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}])
def test_bad_response_formats_are_refused(form: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="response_format"):
        shown([user()], response_format=form)


def test_reasoning_effort() -> None:
    assert resolve_effort(None) == (True, "")
    assert resolve_effort("none") == (False, "")
    assert [resolve_effort(e) for e in ("low", "high", "max")] == [(True, "low"), (True, "high"), (True, "max")]
    with pytest.raises(InputError, match="medium"):
        resolve_effort("medium")


def test_instruction_texts_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "texts.json"
    path.write_text(json.dumps({"static_tools": "a", "dynamic_tools": "b", "choice_required": "c", "choice_none": "d",
                                "format_object": "e", "format_schema": "f", "effort": {"max": "g"},
                                "default_effort": "max"}))
    codec = ChatCodec(TOKENIZER, InstructionTexts.load(path))
    assert 'thinking-effort"<|sep|>g' in codec.describe(codec.prompt_ids(parse_messages([user()])))
    path.write_text('{"static_tools": "a", "colour": 1}')
    with pytest.raises(ConfigError, match="colour"):
        InstructionTexts.load(path)
