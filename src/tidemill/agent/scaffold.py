"""The K3 grammar around the policy's choices: what is given, what is sampled, and demonstrations written the same way.

In forced mode the harness writes every token of an assistant turn that carries no decision, and the policy fills slots:

    <open>message role="assistant"<sep><open>think<sep><close>think<sep><open>response<sep>
        [response <close>]                  an empty response means: call a tool
        response<sep><open>tools<sep><open>call tool="
        [name "]
        index="1"<sep><open>argument key="code" type="string"<sep>
        [value <close>]                     one slot per required parameter
        argument<sep><close>call<sep><close>tools<sep><close>message<sep><end_of_msg>

Given tokens are masked from the loss. A slot ends with one marker or sign that the policy samples itself; any other
control token in a slot is a stray one and the policy's fault.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tidemill.agent.task import Drill, Problem, Turn
from tidemill.agent.tool import Tool, declaration
from tidemill.core.errors import InputError
from tidemill.core.token_log import TokenLog
from tidemill.model.chat.codec import ChatCodec, ChatOptions
from tidemill.model.chat.grammar import Marker, Segment, attribute, close_tag, open_tag, render_tool_result
from tidemill.model.chat.messages import parse_messages


@dataclass(frozen=True, slots=True)
class Slot:
    """What was sampled into a slot: its text, and whether it ended as it should."""

    text: str
    ended: bool
    stray: bool
    """Ended by a control token that does not belong here."""


class Scaffold:
    """Given token lists of the forced mode for one codec and one set of tools. `effort` writes the thinking-effort
    message; empty writes none."""

    def __init__(self, codec: ChatCodec, tools: Sequence[Tool], *, declare: bool = True, effort: str = "") -> None:
        self.codec = codec
        self.tools = {tool.name: tool for tool in tools}
        declared = tuple(declaration(tool) for tool in tools) if declare else ()
        self._options = ChatOptions(tools=declared, effort=effort, generation_prefix=False)
        control = codec.vocabulary.control
        self.close_id = control.close
        quote = codec.encode(['"'])
        if len(quote) != 1:
            raise InputError("the vocabulary has no single token for a double quote", field="tokenizer",
                             remedy="Use the free scaffold with this vocabulary.")
        self.quote_id = quote[0]
        self._control = frozenset({control.open, control.close, control.sep, control.end_of_msg, control.eos})
        self._turn = self._ids([*open_tag("message", [("role", "assistant")]), *open_tag("think"),
                                *close_tag("think"), *open_tag("response")])
        self._end_answer = self._ids(["response", Marker.SEP, *close_tag("message"), Marker.END_OF_MSG])
        self._begin_call = self._ids(["response", Marker.SEP, *open_tag("tools"), Marker.OPEN, "call", " tool", '="'])
        self._call_header = self._ids([*attribute("index", "1"), Marker.SEP])
        self._end_call = self._ids([*close_tag("call"), *close_tag("tools"), *close_tag("message"), Marker.END_OF_MSG])
        self._end_argument = self._ids(["argument", Marker.SEP])

    def _ids(self, segments: Iterable[Segment]) -> tuple[int, ...]:
        return tuple(self.codec.encode(segments))

    def prompt(self, problem: Problem) -> tuple[int, ...]:
        """The problem's messages, with the tools declared in front if wanted."""
        return tuple(self.codec.prompt_ids(parse_messages(list(problem.messages)), self._options))

    def turn(self) -> tuple[int, ...]:
        """Opens an assistant turn up to its response slot; thinking is empty."""
        return self._turn

    def end_answer(self) -> tuple[int, ...]:
        """After a response slot that held the answer."""
        return self._end_answer

    def begin_call(self) -> tuple[int, ...]:
        """After an empty response slot, up to the tool name."""
        return self._begin_call

    def parameters(self, tool: Tool) -> list[tuple[str, str]]:
        """Name and grammar type of the slots of a call: the required parameters in the schema's order."""
        properties = tool.parameters.get("properties", {})
        kinds = {"integer": "number"}
        out: list[tuple[str, str]] = []
        for name in tool.parameters.get("required", ()):
            kind = str(properties[name].get("type", "string"))
            out.append((name, kinds.get(kind, kind)))
        return out

    def begin_argument(self, name: str, kind: str, *, first: bool) -> tuple[int, ...]:
        """Up to the value slot of a parameter; `first` also closes the call's header."""
        ids = self._ids(open_tag("argument", [("key", name), ("type", kind)]))
        return (*self._call_header, *ids) if first else ids

    def end_argument(self) -> tuple[int, ...]:
        """After a value slot."""
        return self._end_argument

    def end_call(self, *, without_arguments: bool = False) -> tuple[int, ...]:
        """Closes call, tools and message."""
        return (*self._call_header, *self._end_call) if without_arguments else self._end_call

    def result(self, tool: str, text: str) -> tuple[int, ...]:
        """The message that carries a tool's result."""
        return self._ids(render_tool_result(tool, text, 1))

    def stops(self, end_id: int) -> tuple[int, ...]:
        """Ids at which sampling a slot stops: its end, and every marker that would be a stray one."""
        return tuple(sorted({end_id, *self._control}))

    def read(self, ids: Sequence[int], end_id: int) -> Slot:
        """What a sampled slot says."""
        ended = bool(ids) and ids[-1] == end_id
        stray = bool(ids) and not ended and ids[-1] in self._control
        body = ids[:-1] if ended or stray else ids
        data = b"".join(self.codec.vocabulary.token_bytes(i) for i in body)
        return Slot(data.decode("utf-8", "replace"), ended, stray)

    # -- demonstrations --------------------------------------------------------------------------------------------

    def demonstration(self, problem: Problem, turns: Sequence[Turn]) -> TokenLog:
        """The token log of an expert episode: the same given tokens, the expert's choices as sampled ones."""
        log = TokenLog()
        log.give(self.prompt(problem))
        for turn in turns:
            log.give(self._turn)
            if not turn.tool:
                self._choose(log, self._ids([turn.answer]), self.close_id)
                log.give(self._end_answer)
                continue
            self._choose(log, (), self.close_id)
            log.give(self._begin_call)
            self._choose(log, self._ids([turn.tool]), self.quote_id)
            slots = self.parameters(self.tools[turn.tool])
            for number, (name, kind) in enumerate(slots):
                log.give(self.begin_argument(name, kind, first=number == 0))
                value = turn.arguments[name]
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                self._choose(log, self._ids([text]), self.close_id)
                log.give(self._end_argument)
            log.give(self.end_call(without_arguments=not slots))
            log.give(self.result(turn.tool, turn.result))
        return log

    def drill(self, drill: Drill) -> TokenLog:
        """A fragment: messages, then one slot in its own surroundings."""
        log = TokenLog()
        options = ChatOptions(generation_prefix=False)
        log.give(self.codec.prompt_ids(parse_messages(list(drill.messages)), options))
        if drill.tool:
            kind = dict(self.parameters(self.tools[drill.tool]))[drill.key]
            log.give(self.begin_argument(drill.key, kind, first=False))
            self._choose(log, self._ids([drill.argument]), self.close_id)
        else:
            log.give(self._turn)
            self._choose(log, self._ids([drill.answer]), self.close_id)
        return log

    @staticmethod
    def _choose(log: TokenLog, ids: Sequence[int], end_id: int) -> None:
        chosen = (*ids, end_id)
        log.sample(chosen, [0.0] * len(chosen), [0] * len(chosen))
