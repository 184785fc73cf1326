"""Sampled ids back to a message, token by token: reasoning, answer and tool calls as they become certain.

Works on ids, so a marker is a marker only if it was sampled as one. Accepts what models really do (thinking that is
never closed, an answer inside the think channel, calls without an answer) and says so in `deviations`; a call that
cannot be understood is reported as malformed and never guessed at. Feeding the same ids in any pieces gives the same
message, and the deltas joined give its texts.

Every sampled character before the end is in exactly one place: reasoning, content, a call's name and arguments, a
malformed call's `text`, `stray`, or in a marker that was understood. Only white space between the parts of a call and a
last character whose bytes are incomplete are not kept.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, cast

from tidemill.model.chat.grammar import ARGUMENT_TYPES, argument_value, escape, parse_header
from tidemill.model.chat.tokenizer import Vocabulary

Channel = Literal["reasoning", "content"]
_MAX_DEVIATIONS = 50
"""Noted per message; a model that has gone astray makes one per token."""


@dataclass(frozen=True, slots=True)
class TextDelta:
    """More text of a channel."""

    channel: Channel
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedCall:
    """A whole call. `arguments` holds typed values."""

    name: str
    arguments: Mapping[str, Any]

    @property
    def arguments_json(self) -> str:
        """The arguments as the JSON text the OpenAI API carries."""
        return json.dumps(dict(self.arguments), ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class MalformedCall:
    """A call that was begun and cannot be understood; `problem` says why, for whoever made it.

    text  what was sampled for it, without the markers' signs: headers and values in order
    """

    name: str
    problem: str
    text: str = ""


Event = TextDelta | ParsedCall | MalformedCall


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedMessage:
    """What an assistant turn says.

    calls      whole and malformed calls in order
    complete   the message was ended by the model, not cut off
    deviations what did not follow the grammar, for logs
    stray      text that belongs nowhere: between channels, in markers that are malformed, misplaced or cut off, and
               attributes that mean nothing
    """

    reasoning: str
    content: str
    calls: tuple[ParsedCall | MalformedCall, ...]
    complete: bool
    reasoning_tokens: int
    deviations: tuple[str, ...]
    stray: str

    @property
    def tool_calls(self) -> tuple[ParsedCall, ...]:
        """The calls that can be carried out."""
        return tuple(c for c in self.calls if isinstance(c, ParsedCall))


class _Where(Enum):
    THINK = "think"
    RESPONSE = "response"
    BODY = "between channels"
    TOOLS = "tools"
    CALL = "call"
    VALUE = "argument"
    DONE = "after the end"


_IN_TOOLS = (_Where.TOOLS, _Where.CALL, _Where.VALUE)


class _Kept:
    """Bytes kept for a report. What stands on both sides of a control token never joins into one character."""

    def __init__(self) -> None:
        self._pieces: list[bytearray] = [bytearray()]

    def add(self, data: bytes | bytearray) -> None:
        self._pieces[-1] += data

    def cut(self) -> None:
        if self._pieces[-1]:
            self._pieces.append(bytearray())

    @property
    def text(self) -> str:
        return "".join(piece.decode("utf-8", "replace") for piece in self._pieces)


@dataclass(slots=True)
class _Header:
    """What stands between a marker and its separator."""

    opens: bool
    raw: bytearray = field(default_factory=bytearray)
    broken: bool = False
    """A control token stands in it."""


@dataclass(slots=True)
class _Call:
    name: str
    kept: _Kept = field(default_factory=_Kept)
    problem: str = ""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    whole: bool = False
    """Its arguments came as one JSON object."""
    key: str = ""
    kind: str = ""
    """Type of the open argument; `json` for arguments carried raw."""
    value: bytearray = field(default_factory=bytearray)


class StreamParser:
    """Feed sampled ids with `push`, end with `finish`, read `message`.

    thinking        whether the generation prefix opened the think channel (else the response channel)
    hold_reasoning  keep reasoning back until its channel is known to be reasoning: an answer closed by `response`
                    inside the think channel turns the text so far into content, and deltas cannot be taken back
    """

    def __init__(self, vocabulary: Vocabulary, *, thinking: bool, hold_reasoning: bool = False) -> None:
        self._vocabulary = vocabulary
        control = vocabulary.control
        self._open, self._close, self._sep = control.open, control.close, control.sep
        self._ends = (control.end_of_msg, control.eos)
        self._where = _Where.THINK if thinking else _Where.RESPONSE
        self._hold = hold_reasoning
        self._texts: dict[Channel, list[str]] = {"reasoning": [], "content": []}
        self._held: list[str] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._header: _Header | None = None
        self._call: _Call | None = None
        self._calls: list[ParsedCall | MalformedCall] = []
        self._deviations: list[str] = []
        self._undecided = thinking
        """The think channel may still turn out to hold the answer."""
        self._reasoning_tokens = 0
        self._stray = _Kept()
        self._complete = False
        self._events: list[Event] = []

    @property
    def done(self) -> bool:
        """Whether the message has ended; later ids are ignored."""
        return self._where is _Where.DONE

    @property
    def message(self) -> ParsedMessage:
        """What is known so far; final after `finish`."""
        return ParsedMessage(
            reasoning="".join(self._texts["reasoning"]), content="".join(self._texts["content"]),
            calls=tuple(self._calls), complete=self._complete, reasoning_tokens=self._reasoning_tokens,
            deviations=tuple(self._deviations), stray=self._stray.text,
        )

    def push(self, ids: Iterable[int]) -> list[Event]:
        """Take sampled ids; returns what became certain."""
        for token_id in ids:
            if self._where is _Where.DONE:
                break
            if self._where is _Where.THINK and self._header is None and not self._is_control(token_id):
                self._reasoning_tokens += 1
            self._token(token_id)
        return self._take()

    def finish(self) -> list[Event]:
        """The generation ended. A marker cut off is stray, a character cut in two dropped, a call cut off malformed."""
        if self._where is not _Where.DONE:
            if self._header is not None:
                self._reject(self._header.raw)
                self._header = None
            self._decoder.reset()
            self._release_reasoning()
            self._end_call("it was cut off")
            self._where = _Where.DONE
        return self._take()

    # -- tokens ---------------------------------------------------------------------------------------------------

    def _is_control(self, token_id: int) -> bool:
        return token_id in (self._open, self._close, self._sep, *self._ends)

    def _token(self, token_id: int) -> None:
        data = self._vocabulary.token_bytes(token_id)
        if data:
            self._text(data)
            return
        self._kept.cut()
        self._control(token_id)
        self._kept.cut()

    def _control(self, token_id: int) -> None:
        if token_id in self._ends:
            self._drop_header("the end of the message inside a marker")
            self._end_message()
        elif token_id in (self._open, self._close):
            self._drop_header("a marker inside a marker")
            self._flush_text()
            self._header = _Header(token_id == self._open)
        elif token_id == self._sep:
            header, self._header = self._header, None
            if header is None:
                self._flush_text()
                self._deviate("a separator without a marker")
                self._blame("a separator stands in it")
            else:
                self._marker(header)
        else:
            name = self._vocabulary.token_name(token_id)
            self._flush_text()
            self._deviate(f"control token {name} in text")
            self._blame("a control token stands in it")
            if self._header is not None:
                self._header.broken = True
                self._header.raw += name.encode()

    def _text(self, data: bytes) -> None:
        if self._header is not None:
            self._header.raw += data
        elif self._where is _Where.THINK:
            self._add("reasoning", self._decoder.decode(data))
        elif self._where is _Where.RESPONSE:
            self._add("content", self._decoder.decode(data))
        elif self._where is _Where.VALUE and self._call is not None:
            self._call.value += data
            self._call.kept.add(data)
        else:
            self._reject(data)
            if data.strip():
                self._deviate(f"text {self._where.value}")
                self._blame("there is text outside its arguments")

    def _marker(self, header: _Header) -> None:
        parsed = None if header.broken else _parse(header.raw)
        if parsed is None:
            self._deviate(f"malformed marker {header.raw[:40].decode('utf-8', 'replace')!r}")
            if header.opens and self._where in _IN_TOOLS and header.raw.split()[:1] == [b"call"]:
                self._begin_call("")
                self._blame("its header is malformed")
            self._blame("a marker in it is malformed")
            self._reject(header.raw)
            return
        tag, attributes = parsed
        if not (self._opened(tag, attributes) if header.opens else self._closed(tag)):
            self._deviate(f"{'opening' if header.opens else 'closing'} {tag[:40]!r} {self._where.value}")
            self._blame(f"{tag[:40]!r} does not belong in a call")
            self._reject(header.raw)
            return
        known = _known(tag, attributes) if header.opens else {}
        unknown = {k: v for k, v in attributes.items() if k not in known}
        if unknown:
            self._deviate(f"attributes {', '.join(unknown)[:40]!r} of {tag!r}")
            self._stray.cut()
            self._stray.add(_spelled(unknown))
        if self._call is not None:
            self._call.kept.add(tag.encode() + _spelled(known))

    def _opened(self, tag: str, attributes: Mapping[str, str]) -> bool:
        where = self._where
        if tag in ("response", "tools") and where not in (_Where.DONE, _Where[tag.upper()]):
            self._leave()
            self._where = _Where[tag.upper()]
            return True
        if tag == "think" and where is _Where.BODY:
            self._where = _Where.THINK
            return True
        if tag == "call" and where in _IN_TOOLS:
            self._begin_call(attributes.get("tool", ""))
            if not attributes.get("tool"):
                self._blame("it names no tool")
            return True
        if tag in ("argument", "json") and where is _Where.CALL and self._call is not None:
            self._begin_argument(tag, attributes)
            return True
        return False

    def _closed(self, tag: str) -> bool:
        where = self._where
        if tag == "message":
            self._end_message()
            return True
        if tag == "response" and where is _Where.THINK and self._undecided:
            self._reclassify()
            self._where = _Where.BODY
            return True
        if tag in ("think", "response") and where is _Where[tag.upper()]:
            self._leave()
            return True
        if tag == "tools" and where in _IN_TOOLS:
            self._leave()
            return True
        if tag == "call" and where in (_Where.CALL, _Where.VALUE):
            self._end_call("" if where is _Where.CALL else "an argument was not closed")
            self._where = _Where.TOOLS
            return True
        call = self._call
        if where is _Where.VALUE and call is not None and tag == ("json" if call.kind == "json" else "argument"):
            self._end_argument(call)
            self._where = _Where.CALL
            return True
        return False

    # -- calls ----------------------------------------------------------------------------------------------------

    def _begin_call(self, name: str) -> None:
        self._end_call("it was not closed before the next one")
        self._call = _Call(name)
        self._where = _Where.CALL

    def _begin_argument(self, tag: str, attributes: Mapping[str, str]) -> None:
        call = cast("_Call", self._call)
        call.value = bytearray()
        call.key, call.kind = attributes.get("key", ""), attributes.get("type", "")
        if call.whole or (tag == "json" and call.arguments):
            self._blame("its arguments are given twice")
        if tag == "json":
            call.kind, call.whole = "json", True
        elif "key" not in attributes:
            self._blame("an argument has no key")
        elif call.key in call.arguments:
            self._blame(f"argument {call.key!r} is given twice")
        elif call.kind not in ARGUMENT_TYPES:
            self._blame(f"argument {call.key!r} has type {call.kind!r}, expected one of {', '.join(ARGUMENT_TYPES)}")
        self._where = _Where.VALUE

    def _end_argument(self, call: _Call) -> None:
        try:
            text = call.value.decode()
        except UnicodeDecodeError:
            self._blame(f"argument {call.key!r} is not valid UTF-8")
            return
        if call.kind != "json":
            call.arguments.setdefault(call.key, argument_value(text, call.kind))
            return
        value = argument_value(text, "object")
        if isinstance(value, dict):
            call.arguments = cast("dict[str, Any]", value)
        else:
            self._blame("its arguments are not a JSON object")

    def _end_call(self, problem: str) -> None:
        """Report the open call, if any; `problem` unless it has one already."""
        call, self._call = self._call, None
        if call is None:
            return
        problem = call.problem or problem
        done = MalformedCall(name=call.name, problem=problem, text=call.kept.text) if problem \
            else ParsedCall(name=call.name, arguments=call.arguments)
        self._calls.append(done)
        self._events.append(done)

    def _blame(self, problem: str) -> None:
        if self._call is not None and not self._call.problem:
            self._call.problem = problem

    # -- channels -------------------------------------------------------------------------------------------------

    def _add(self, channel: Channel, text: str) -> None:
        if not text:
            return
        self._texts[channel].append(text)
        if channel == "reasoning" and self._hold and self._undecided:
            self._held.append(text)
        else:
            self._events.append(TextDelta(channel, text))

    def _flush_text(self) -> None:
        """A character cut off by a marker is complete nonsense, not half of one: show it."""
        rest = self._decoder.decode(b"", True)
        self._decoder.reset()
        if self._where in (_Where.THINK, _Where.RESPONSE):
            self._add("reasoning" if self._where is _Where.THINK else "content", rest)

    def _release_reasoning(self) -> None:
        self._undecided = False
        if self._held:
            self._events.append(TextDelta("reasoning", "".join(self._held)))
            self._held.clear()

    def _reclassify(self) -> None:
        """The text of the think channel was the answer."""
        text = "".join(self._texts["reasoning"])
        self._deviate("an answer in the think channel")
        self._texts["reasoning"].clear()
        self._held.clear()
        self._undecided = False
        self._reasoning_tokens = 0
        if text:
            self._texts["content"].append(text)
            self._events.append(TextDelta("content", text))

    def _leave(self) -> None:
        """Out of whatever channel is open, into the message body."""
        if self._where is _Where.THINK:
            self._release_reasoning()
        self._end_call("it was not closed")
        self._where = _Where.BODY

    def _end_message(self) -> None:
        self._flush_text()
        self._leave()
        self._complete = True
        self._where = _Where.DONE

    def _drop_header(self, what: str) -> None:
        header, self._header = self._header, None
        if header is not None:
            self._deviate(what)
            self._blame("a marker in it is malformed")
            self._reject(header.raw)

    def _reject(self, data: bytes | bytearray) -> None:
        """Keep text that belongs nowhere: with the open call if there is one."""
        self._kept.add(data)

    @property
    def _kept(self) -> _Kept:
        return self._stray if self._call is None else self._call.kept

    def _deviate(self, what: str) -> None:
        if len(self._deviations) < _MAX_DEVIATIONS:
            self._deviations.append(what)

    def _take(self) -> list[Event]:
        """Events so far, neighbouring deltas of one channel joined."""
        events: list[Event] = []
        for event in self._events:
            last = events[-1] if events else None
            if isinstance(event, TextDelta) and isinstance(last, TextDelta) and last.channel == event.channel:
                events[-1] = TextDelta(event.channel, last.text + event.text)
            else:
                events.append(event)
        self._events = []
        return events


def _known(tag: str, attributes: Mapping[str, str]) -> dict[str, str]:
    """The attributes that mean something. The place of a call is its place in the list, whatever its index says."""
    names = {"call": ("tool", "index"), "argument": ("key", "type"), "json": ("type",)}.get(tag, ())
    return {k: v for k, v in attributes.items() if k in names
            and (k != "index" or v.isdecimal()) and (tag != "json" or v == "object")}


def _spelled(attributes: Mapping[str, str]) -> bytes:
    return "".join(f' {name}="{escape(value)}"' for name, value in attributes.items()).encode()


def _parse(raw: bytearray) -> tuple[str, dict[str, str]] | None:
    try:
        return parse_header(raw.decode())
    except UnicodeDecodeError:
        return None
