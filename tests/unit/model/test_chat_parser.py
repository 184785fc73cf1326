"""Parser: round trips, every split point, the deviations seen in real outputs, malformed and cut calls."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.model.chat import (
    ChatCodec,
    ChatOptions,
    MalformedCall,
    ParsedCall,
    ParsedMessage,
    TextDelta,
    build_tokenizer,
    parse_messages,
)

TOKENIZER = build_tokenizer()
CODEC = ChatCodec(TOKENIZER)
C = TOKENIZER.control
END = [C.end_of_msg]
NAMES = {"<|open|>": C.open, "<|close|>": C.close, "<|sep|>": C.sep, "<|end_of_msg|>": C.end_of_msg, "[EOS]": C.eos,
         "[BOS]": C.bos}


def ids(text: str) -> list[int]:
    """Sampled ids of text in which marker spellings stand for the markers themselves."""
    found: list[int] = []
    while text:
        at, name = min(((text.find(n), n) for n in NAMES if n in text), default=(len(text), ""))
        found += TOKENIZER.encode_text(text[:at])
        if name:
            found.append(NAMES[name])
        text = text[at + len(name):]
    return found


def parse(sampled: list[int], *, thinking: bool = True, hold: bool = False,
          cuts: tuple[int, ...] = ()) -> tuple[ParsedMessage, list[Any]]:
    """The message and all events, fed in pieces cut at the given places."""
    parser = CODEC.parser(thinking=thinking, hold_reasoning=hold)
    events: list[Any] = []
    bounds = sorted({0, len(sampled), *(min(c, len(sampled)) for c in cuts)})
    for a, b in pairwise(bounds):
        events += parser.push(sampled[a:b])
    events += parser.finish()
    assert parser.done
    return parser.message, events


def joined(events: list[Any], channel: str) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta) and e.channel == channel)


def message(text: str, **kwargs: Any) -> ParsedMessage:
    return parse(ids(text), **kwargs)[0]


TAIL = "<|close|>message<|sep|><|end_of_msg|>"
ANSWER = "because<|close|>think<|sep|><|open|>response<|sep|>42<|close|>response<|sep|>"


def test_a_plain_turn() -> None:
    found = message(ANSWER + TAIL)
    assert (found.reasoning, found.content, found.calls, found.complete) == ("because", "42", (), True)
    assert found.reasoning_tokens == len(TOKENIZER.encode_text("because"))
    assert not found.deviations


def test_without_thinking_text_starts_in_the_response() -> None:
    found = message("42<|close|>response<|sep|>" + TAIL, thinking=False)
    assert (found.reasoning, found.content, found.complete, found.deviations) == ("", "42", True, ())


@pytest.mark.parametrize(("text", "reasoning", "content"), [
    ("r<|open|>response<|sep|>c<|close|>response<|sep|>" + TAIL, "r", "c"),
    ("r<|close|>message<|sep|><|end_of_msg|>", "r", ""),
    ("r<|end_of_msg|>", "r", ""),
    ("r[EOS]", "r", ""),
    ("c<|close|>response<|sep|>" + TAIL, "", "c"),
    ("r<|close|>think<|sep|><|open|>response<|sep|>c" + TAIL, "r", "c"),
    ("r<|close|>think<|sep|><|open|>response<|sep|>c<|end_of_msg|>", "r", "c"),
])
def test_real_deviations(text: str, reasoning: str, content: str) -> None:
    found = message(text)
    assert (found.reasoning, found.content, found.complete) == (reasoning, content, True)


CALL = ('<|open|>call tool="python" index="1"<|sep|><|open|>argument key="code" type="string"<|sep|>1+1'
        "<|close|>argument<|sep|><|close|>call<|sep|>")
TOOLS = f"<|open|>tools<|sep|>{CALL}<|close|>tools<|sep|>"


@pytest.mark.parametrize("before", ["r", "r<|close|>think<|sep|>",
                                    "r<|close|>think<|sep|><|open|>response<|sep|><|close|>response<|sep|>",
                                    "r<|close|>think<|sep|><|open|>response<|sep|>"])
def test_calls_may_follow_any_channel(before: str) -> None:
    found = message(before + TOOLS + TAIL)
    assert found.reasoning == "r"
    assert found.calls == (ParsedCall(name="python", arguments={"code": "1+1"}),)
    assert found.calls == found.tool_calls


def test_an_answer_in_the_think_channel_is_the_answer_in_deltas_too_when_reasoning_is_held() -> None:
    sampled = ids("c<|close|>response<|sep|>" + TAIL)
    found, events = parse(sampled, hold=True, cuts=tuple(range(9)))
    assert (joined(events, "reasoning"), joined(events, "content")) == ("", "c") == (found.reasoning, found.content)
    _, events = parse(sampled, cuts=tuple(range(9)))
    assert joined(events, "content") == "c"
    assert found.deviations


def test_argument_types() -> None:
    def argument(kind: str, text: str) -> str:
        return f'<|open|>argument key="k" type="{kind}"<|sep|>{text}<|close|>argument<|sep|>'

    def value(kind: str, text: str) -> Any:
        found = message(f'<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|>{argument(kind, text)}'
                        f"<|close|>call<|sep|><|close|>tools<|sep|>{TAIL}")
        return found.tool_calls[0].arguments["k"]

    assert value("string", "007") == "007"
    assert value("number", "7") == 7
    assert value("number", "1e3") == 1000.0
    assert value("boolean", "true") is True
    assert value("null", "null") is None
    assert value("array", '[1, "x"]') == [1, "x"]
    assert value("object", '{"a": 1}') == {"a": 1}
    assert value("number", "seven") == "seven"
    assert value("number", "true") == "true"
    assert value("array", "[" * 50_000) == "[" * 50_000


def body(text: str) -> str:
    return f"<|close|>think<|sep|><|open|>tools<|sep|>{text}<|close|>tools<|sep|>{TAIL}"


ARGUMENT = '<|open|>argument key="a" type="string"<|sep|>x<|close|>argument<|sep|>'


@pytest.mark.parametrize(("call", "problem"), [
    (f'<|open|>call index="1"<|sep|>{ARGUMENT}<|close|>call<|sep|>', "names no tool"),
    ('<|open|>call tool="f"<|sep|><|open|>argument type="string"<|sep|>x<|close|>argument<|sep|><|close|>call<|sep|>',
     "no key"),
    (f'<|open|>call tool="f"<|sep|>{ARGUMENT}{ARGUMENT}<|close|>call<|sep|>', "twice"),
    ('<|open|>call tool="f"<|sep|><|open|>argument key="a" type="int"<|sep|>3<|close|>argument<|sep|>'
     "<|close|>call<|sep|>", "type 'int'"),
    ('<|open|>call tool="f"<|sep|><|open|>argument key="a" type="string"<|sep|>x<|close|>call<|sep|>', "not closed"),
    (f'<|open|>call tool="f"<|sep|>{ARGUMENT}', "not closed"),
    (f'<|open|>call tool=f<|sep|>{ARGUMENT}<|close|>call<|sep|>', "its header is malformed"),
    (f'<|open|>call tool="f[BOS]"<|sep|>{ARGUMENT}<|close|>call<|sep|>', "its header is malformed"),
    ('<|open|>call tool="f"<|sep|>hello<|close|>call<|sep|>', "outside its arguments"),
    ('<|open|>call tool="f"<|sep|><|open|>argument key=a<|sep|>x<|close|>argument<|sep|><|close|>call<|sep|>',
     "malformed"),
    (f'<|open|>call tool="f"<|sep|>{ARGUMENT}<|open|>think<|sep|><|close|>call<|sep|>', "does not belong"),
    ('<|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>[1]<|close|>json<|sep|><|close|>call<|sep|>',
     "not a JSON object"),
    ('<|open|>call tool="f"<|sep|><|open|>argument key="a" type="string"<|sep|>x[BOS]<|close|>argument<|sep|>'
     "<|close|>call<|sep|>", "control token"),
    ('<|open|>call tool="f"<|sep|><|open|>argument key="a" type="string"<|sep|>x<|sep|>y<|close|>argument<|sep|>'
     "<|close|>call<|sep|>", "separator"),
    (f'<|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>{{}}<|close|>json<|sep|>{ARGUMENT}'
     "<|close|>call<|sep|>", "given twice"),
    (f'<|open|>call tool="f"<|sep|>{ARGUMENT}<|open|>json type="object"<|sep|>{{}}<|close|>json<|sep|>'
     "<|close|>call<|sep|>", "given twice"),
    ('<|open|>call tool="f"<|sep|><|open|>argument key="a" key="b" type="string"<|sep|>x<|close|>argument<|sep|>'
     "<|close|>call<|sep|>", "malformed"),
])
def test_malformed_calls_are_reported_and_not_carried_out(call: str, problem: str) -> None:
    found = message(body(call))
    assert found.tool_calls == ()
    (bad,) = found.calls
    assert isinstance(bad, MalformedCall)
    assert problem in bad.problem


def test_a_malformed_call_does_not_spoil_its_neighbour() -> None:
    found = message(body('<|open|>call index="1"<|sep|><|close|>call<|sep|>' + CALL))
    assert [type(c) for c in found.calls] == [MalformedCall, ParsedCall]


@pytest.mark.parametrize("header", [
    'call index="1" tool="python"', 'call tool="python"', 'call  tool="python"  index="7" ',
    'call index="" tool="python"',
])
def test_a_call_needs_only_its_tool_in_any_order(header: str) -> None:
    found = message(body(CALL.replace('call tool="python" index="1"', header)))
    assert found.calls == (ParsedCall(name="python", arguments={"code": "1+1"}),)


def test_a_malformed_call_keeps_what_was_sampled_for_it() -> None:
    (bad,) = message(body(CALL.replace('type="string"', 'type="int"'))).calls
    assert isinstance(bad, MalformedCall)
    assert bad.text == 'call tool="python" index="1"argument key="code" type="int"1+1argument'


def test_an_argument_with_half_a_character_is_malformed_and_not_repaired() -> None:
    before, after = body(CALL).split("1+1")
    (bad,) = parse([*ids(before), *ids("€")[:2], *ids(after)])[0].calls
    assert isinstance(bad, MalformedCall)
    assert "not valid UTF-8" in bad.problem


@pytest.mark.parametrize(("text", "reasoning", "content", "stray"), [
    ("r<|close|>think<|sep|>x<|open|>response<|sep|>c<|end_of_msg|>", "r", "c", "x"),
    ("r<|open|>file name=\"n\"<|sep|>x<|close|>file<|sep|><|end_of_msg|>", "rx", "", 'file name="n"file'),
    ("r<|close|>think<|sep|><|open|>file<|sep|>x<|close|>file<|sep|><|end_of_msg|>", "r", "", "filexfile"),
    ("r<|open|>thi<|open|>response<|sep|>c<|end_of_msg|>", "r", "c", "thi"),
    ("r<|close|>thi[BOS]nk<|sep|>s<|end_of_msg|>", "rs", "", "thi[BOS]nk"),
    ("r<|close|>think<|sep|><|open|>response<|sep|>c<|close|>respon", "r", "c", "respon"),
    ('r<|open|>response kind="k"<|sep|>c<|end_of_msg|>', "r", "c", ' kind="k"'),
    ("r<|close|>think<|sep|><|open|>think<|sep|>s<|close|>response<|sep|>t<|end_of_msg|>", "rst", "", "response"),
])
def test_text_that_belongs_nowhere_is_reported(text: str, reasoning: str, content: str, stray: str) -> None:
    found = message(text)
    assert (found.reasoning, found.content, found.stray) == (reasoning, content, stray)
    assert found.deviations or not found.complete


def test_a_control_token_does_not_join_the_halves_of_a_character() -> None:
    euro = ids("€")
    assert parse([*euro[:1], C.bos, *euro[1:]], thinking=False)[0].content.count("€") == 0


def test_a_malformed_header_ends_the_call_before_it() -> None:
    found = message(body(f'<|open|>call tool="f"<|sep|>{ARGUMENT}<|open|>call tool=g<|sep|><|close|>call<|sep|>'))
    assert [c.problem for c in found.calls if isinstance(c, MalformedCall)] == [
        "it was not closed before the next one", "its header is malformed"]


def test_raw_json_arguments_are_understood() -> None:
    found = message(body('<|open|>call tool="f"<|sep|><|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'
                         "<|close|>call<|sep|>"))
    assert found.calls == (ParsedCall(name="f", arguments={"a": 1}),)


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), [
    ("r<|close|>", "r", "", 0), ("r<|close|>thi", "r", "", 0), ("r<|close|>think<|sep|><|open|>resp", "r", "", 0),
    ("r<|close|>think<|sep|><|open|>response<|sep|>c<|close|>response", "r", "c", 0),
    ("r<|close|>think<|sep|>" + TOOLS[:90], "r", "", 1),
])
def test_a_cut_strips_half_markers_and_reports_half_calls(text: str, reasoning: str, content: str, calls: int) -> None:
    found = message(text)
    assert (found.reasoning, found.content, len(found.calls)) == (reasoning, content, calls)
    assert not found.complete
    assert found.tool_calls == ()


def test_a_character_cut_in_two_is_held_back_and_dropped_at_the_end() -> None:
    euro = ids("€")
    assert len(euro) == 3
    parser = CODEC.parser(thinking=False)
    assert parser.push([*ids("a"), *euro[:2]]) == [TextDelta("content", "a")]
    assert parser.push(euro[2:]) == [TextDelta("content", "€")]
    assert parser.push(euro[:2]) == []
    assert parser.finish() == []
    assert parser.message.content == "a€"


def test_a_character_broken_by_a_marker_is_shown_as_broken() -> None:
    found, events = parse([*ids("€")[:2], *ids("<|close|>response<|sep|>" + TAIL)], thinking=False)
    assert found.content == "�" == joined(events, "content")


def test_spelled_markers_are_text() -> None:
    sampled = [*TOKENIZER.encode_text("<|close|>think<|sep|>"), *ids("<|close|>think<|sep|>" + TAIL)]
    assert parse(sampled)[0].reasoning == "<|close|>think<|sep|>"


def test_nothing_counts_after_the_end() -> None:
    parser = CODEC.parser()
    parser.push(ids(ANSWER + TAIL))
    assert parser.done
    assert parser.push(ids("more<|open|>response<|sep|>x")) == []
    assert parser.message.content == "42"


def test_deviations_are_noted_but_not_without_end() -> None:
    assert len(parse([C.sep] * 10_000)[0].deviations) == 50


# -- properties -------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=12)
VALUES = st.one_of(TEXT, st.integers(-9, 9), st.booleans(), st.none(), st.lists(st.integers(0, 3), max_size=2))
CALLS = st.lists(st.tuples(TEXT.filter(bool), st.dictionaries(TEXT, VALUES, max_size=3)), max_size=3)


def rendered(reasoning: str, content: str, calls: list[tuple[str, dict[str, Any]]], *, thinking: bool) -> list[int]:
    """What a perfect model would sample for this message."""
    rows = parse_messages([{"role": "assistant", "content": content, "reasoning": reasoning, "tool_calls": [
        {"id": f"{i}", "function": {"name": n, "arguments": json.dumps(a)}} for i, (n, a) in enumerate(calls)]}])
    whole = CODEC.prompt_ids(rows, ChatOptions(thinking=thinking, generation_prefix=False))
    prefix = CODEC.encode(CODEC.generation_prefix(thinking=thinking))
    assert whole[: len(prefix)] == prefix
    return whole[len(prefix):]


@given(TEXT, TEXT, CALLS, st.booleans(), st.booleans(), st.lists(st.integers(0, 80), max_size=6))
def test_what_is_rendered_is_parsed_at_any_split(reasoning: str, content: str, calls: Any, thinking: bool, hold: bool,
                                                 cuts: list[int]) -> None:
    sampled = rendered(reasoning, content, calls, thinking=thinking)
    found, events = parse(sampled, thinking=thinking, hold=hold, cuts=tuple(cuts))
    assert found.reasoning == (reasoning if thinking and reasoning.strip() else "")
    assert found.content == content
    assert [(c.name, dict(c.arguments)) for c in found.tool_calls] == calls
    assert found.complete
    assert not found.deviations
    assert joined(events, "reasoning") == found.reasoning
    assert joined(events, "content") == found.content
    assert [e for e in events if not isinstance(e, TextDelta)] == list(found.calls)


PIECES = st.lists(st.sampled_from([
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>", "[BOS]", "think", "response", "tools", "call", "argument",
    "json", "message", ' tool="f"', ' key="k"', ' type="string"', ' type="number"', "<|close|>think<|sep|>",
    "<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|open|>tools<|sep|>",
    '<|open|>call tool="f"<|sep|>', "<|close|>call<|sep|>",
    '<|open|>argument key="k" type="string"<|sep|>', "<|close|>argument<|sep|>", "x", "€", "3", " ",
]), max_size=25).map("".join)


@given(PIECES, st.booleans(), st.lists(st.integers(0, 60), max_size=6), st.integers(0, 80))
def test_any_ids_in_any_pieces_give_the_same_message(text: str, thinking: bool, cuts: list[int], length: int) -> None:
    sampled = ids(text)[:length]
    whole, at_once = parse(sampled, thinking=thinking, hold=True)
    pieces, events = parse(sampled, thinking=thinking, hold=True, cuts=tuple(cuts))
    single, _ = parse(sampled, thinking=thinking, cuts=tuple(range(len(sampled))))
    assert whole == pieces == single
    for found in (at_once, events):
        assert joined(found, "content") == whole.content
        assert joined(found, "reasoning") == whole.reasoning
        assert [e for e in found if not isinstance(e, TextDelta)] == list(whole.calls)
