"""10,000 random splits and truncations of valid and deviant streams: no character is lost, invented or out of order,
and pieces make no difference. Every text in a stream is made of characters that occur once, so each can be followed."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import count, pairwise
from typing import Any

import pytest

from tidemill.model.chat import ChatCodec, MalformedCall, ParsedCall, ParsedMessage, TextDelta, build_tokenizer
from tidemill.model.chat.grammar import Marker, Segments, close_tag, element, open_tag

TOKENIZER = build_tokenizer()
CODEC = ChatCodec(TOKENIZER)
C = TOKENIZER.control
FIRST = 0x4E00
"""Characters from here are three bytes and three tokens each, so cuts fall inside them."""
STREAMS, CUTS = 2_500, 4


class Source:
    """Random streams; `fresh` gives text no stream had before it was reset."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.marks: Iterator[int] = iter(())

    def fresh(self, most: int = 3) -> str:
        text = "".join(chr(next(self.marks)) for _ in range(self.rng.randint(0, most)))
        return text + self.rng.choice(("", "", " ", "\n", "x&amp;", "="))

    def value(self) -> tuple[str, str]:
        """Type and text of an argument, right or wrong."""
        return self.rng.choice((
            ("string", self.fresh()), ("number", "12"), ("array", f'["{self.fresh().strip()}"]'.replace("\n", "")),
            ("object", json.dumps({"a": self.fresh(1).strip()}, ensure_ascii=False)), ("null", "null"),
            ("number", self.fresh()), ("int", self.fresh()), ("boolean", "true"),
        ))

    def call(self) -> Segments:
        rng = self.rng
        attributes = [("tool", f"t{self.fresh(1).strip()}"), ("index", "1")]
        rng.shuffle(attributes)
        if rng.random() < 0.3:
            attributes.remove(("index", "1"))
        body: Segments = []
        for i in range(rng.randint(0, 2)):
            kind, text = self.value()
            pairs = [("key", f"k{i}{self.fresh(1).strip()}"), ("type", kind)]
            rng.shuffle(pairs)
            body += element("argument", [text], pairs)
        if not body and rng.random() < 0.3:
            body = element("json", [json.dumps({"j": self.fresh(1).strip()}, ensure_ascii=False)], [("type", "object")])
        return element("call", body, attributes)

    def valid(self, *, thinking: bool) -> Segments:
        rng = self.rng
        segments: Segments = []
        if thinking:
            segments += [self.fresh(4), *close_tag("think"), *open_tag("response")]
        segments += [self.fresh(4), *close_tag("response")]
        if rng.random() < 0.6:
            segments += element("tools", [s for _ in range(rng.randint(0, 2)) for s in self.call()])
        return [*segments, *close_tag("message"), Marker.END_OF_MSG]

    def odd(self) -> Segments:
        """A piece that does not belong where it is put."""
        rng = self.rng
        return rng.choice((
            lambda: [self.fresh()], lambda: open_tag("response"), lambda: open_tag("tools"), lambda: open_tag("think"),
            lambda: close_tag("think"), lambda: close_tag("response"), lambda: close_tag("tools"), self.call,
            lambda: close_tag("message"), lambda: close_tag("call"), lambda: [Marker.END_OF_MSG],
            lambda: [Marker.OPEN], lambda: [Marker.CLOSE], lambda: [Marker.SEP],
            lambda: open_tag(f"tag{self.fresh(1).strip()}"), lambda: element("file", [self.fresh()]),
            lambda: [Marker.OPEN, f'call tool={self.fresh(1)}', Marker.SEP], lambda: [Marker.OPEN, self.fresh()],
        ))()

    def stream(self, *, thinking: bool) -> list[int]:
        rng = self.rng
        self.marks = count(FIRST)
        segments = self.valid(thinking=thinking)
        for _ in range(rng.choice((0, 0, 1, 1, 2, 4))):
            at = rng.randint(0, len(segments))
            if rng.random() < 0.5:
                segments[at:at] = self.odd()
            else:
                del segments[at : at + rng.randint(1, 3)]
        ids = CODEC.encode(segments)
        if rng.random() < 0.2:
            ids.insert(rng.randint(0, len(ids)), rng.choice((C.bos, C.open, C.close, C.sep, C.eos)))
        return ids


def run(ids: list[int], cuts: list[int], *, thinking: bool, hold: bool) -> tuple[ParsedMessage, list[Any], int]:
    """The message, its events, and how many ids were pushed when it ended."""
    parser = CODEC.parser(thinking=thinking, hold_reasoning=hold)
    events: list[Any] = []
    end = len(ids)
    for a, b in pairwise([0, *cuts, len(ids)]):
        if not parser.done:
            end = b
        events += parser.push(ids[a:b])
    events += parser.finish()
    return parser.message, events, end


def texts(events: list[Any]) -> dict[str, str]:
    found = {"reasoning": "", "content": ""}
    for e in events:
        if isinstance(e, TextDelta):
            found[e.channel] += e.text
    return found


def marks(text: str) -> Counter[str]:
    return Counter(c for c in text if FIRST <= ord(c) < FIRST + 0x400)


def places(found: ParsedMessage) -> str:
    """All text a message accounts for."""
    calls = (c.text if isinstance(c, MalformedCall) else c.name + json.dumps(dict(c.arguments), ensure_ascii=False)
             for c in found.calls)
    return "".join((found.reasoning, found.content, found.stray, *calls))


def whole_characters(ids: list[int]) -> str:
    """Text of a stream with a break for every control token, without the characters a break or the end cuts in two."""
    data = b"".join(TOKENIZER.token_bytes(i) or b"\n" for i in ids)
    return data.decode("utf-8", "ignore")


def is_subsequence(part: str, whole: str) -> bool:
    letters = iter(whole)
    return all(c in letters for c in part)


@pytest.mark.parametrize("thinking", [True, False])
def test_no_character_is_lost_or_invented_and_pieces_make_no_difference(thinking: bool) -> None:
    source = Source(11 + thinking)
    kinds: Counter[str] = Counter()
    for _ in range(STREAMS // 2):
        stream = source.stream(thinking=thinking)
        for _ in range(CUTS):
            ids = stream[: source.rng.choice((len(stream), source.rng.randint(0, len(stream))))]
            cuts = sorted(source.rng.randint(0, len(ids)) for _ in range(source.rng.randint(0, 6)))
            hold = source.rng.random() < 0.5
            found, events, _ = run(ids, cuts, thinking=thinking, hold=hold)
            single, alone, end = run(ids, list(range(1, len(ids))), thinking=thinking, hold=hold)
            assert found == single
            assert texts(events) == texts(alone)
            assert [e for e in events if not isinstance(e, TextDelta)] == list(found.calls)
            shown = texts(events)
            assert shown["content"] == found.content
            if hold:
                assert shown["reasoning"] == found.reasoning
            text = whole_characters(ids[:end])
            assert marks(places(found)) == marks(text), (TOKENIZER.decode(ids), found)
            for channel in (found.reasoning, found.content):
                assert is_subsequence(channel.replace("�", ""), text)
            kinds.update(type(c).__name__ for c in found.calls)
            kinds.update(k for k, v in (("deviant", found.deviations), ("stray", found.stray),
                                        ("complete", found.complete)) if v)
    assert min(kinds[k] for k in (MalformedCall.__name__, ParsedCall.__name__, "deviant", "stray", "complete")) > 300
