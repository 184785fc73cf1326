"""One choice of a response: an engine stream turned into deltas of text, reasoning and tool calls.

A streaming answer sends the deltas; a non-streaming one joins the very same deltas. That is why the two are equal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from tidemill.core.engine_api import Completion, EngineClient, FinishReason, GenerateRequest, TokenEvent
from tidemill.core.errors import EngineError, NonFiniteError
from tidemill.engine.text import StopScanner
from tidemill.model.chat import MalformedCall, ParsedCall, TextDelta


class Parser(Protocol):
    """Ids to events; the chat codec's parser or PlainParser."""

    def push(self, ids: Sequence[int]) -> Sequence[Any]: ...

    def finish(self) -> Sequence[Any]: ...


@dataclass(slots=True)
class Delta:
    """What became showable at once. `tokens` are the sampled tokens whose text is shown with it."""

    content: str = ""
    reasoning: str = ""
    calls: list[ParsedCall] = field(default_factory=list[ParsedCall])
    tokens: list[TokenEvent] = field(default_factory=list[TokenEvent])

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls or self.tokens)


class Choice:
    """Runs one engine request. Iterate `deltas`; the other fields are final when it ends.

    A stop string acts on content only. Tokens behind it are not reported; usage still counts them.
    """

    def __init__(self, engine: EngineClient, request: GenerateRequest, parser: Parser, stops: Sequence[str], *,
                 with_calls: bool) -> None:
        self._engine, self._request, self._parser = engine, request, parser
        self._scanner = StopScanner(stops)
        self._with_calls = with_calls
        self._waiting: deque[tuple[TokenEvent, int, int]] = deque()
        """Tokens not reported yet, with the length of content before and after them."""
        self.finish_reason = ""
        self.completion_tokens = 0
        self.num_calls = 0
        self.num_malformed = 0
        self.result: Completion | None = None

    @property
    def matched_stop(self) -> str:
        """The stop string that ended it, empty if none did."""
        return self._scanner.matched

    async def deltas(self) -> AsyncGenerator[Delta]:
        """Raises NonFiniteError or EngineError if the engine failed this request. Closing it aborts the request."""
        async with aclosing(cast("Any", self._engine.stream(self._request))) as events:
            async for event in events:
                if isinstance(event, Completion):
                    self.result = event
                    self._check(event)
                    break
                self.completion_tokens += 1
                delta = self._take(self._parser.push((event.token_id,)), event)
                if delta:
                    yield delta
                if self._scanner.matched:
                    break
        delta = self._end()
        if delta:
            yield delta

    def _take(self, events: Sequence[Any], token: TokenEvent | None) -> Delta:
        before = self._scanner.seen
        delta = Delta()
        for event in events:
            if isinstance(event, TextDelta) and event.channel == "content":
                delta.content += self._scanner.push(event.text)
            elif isinstance(event, TextDelta):
                delta.content += self._scanner.flush()
                delta.reasoning += event.text
            elif isinstance(event, ParsedCall) and self._with_calls and not self._scanner.matched:
                delta.content += self._scanner.flush()
                delta.calls.append(event)
                self.num_calls += 1
            elif isinstance(event, MalformedCall):
                self.num_malformed += 1
        if token is not None:
            self._waiting.append((token, before, self._scanner.seen))
        delta.tokens = self._released()
        return delta

    def _released(self) -> list[TokenEvent]:
        shown = self._scanner.shown
        out: list[TokenEvent] = []
        while self._waiting:
            token, before, after = self._waiting[0]
            if not (before < shown or before == after == shown or after <= shown):
                break
            out.append(token)
            self._waiting.popleft()
        return out

    def _end(self) -> Delta:
        delta = Delta()
        if not self._scanner.matched:
            delta = self._take(self._parser.finish(), None)
            if not self._scanner.matched:
                delta.content += self._scanner.flush()
                delta.tokens += [token for token, _, _ in self._waiting]
        self._waiting.clear()
        reason = self.result.finish_reason if self.result else FinishReason.STOP
        if reason is FinishReason.LENGTH and not self._scanner.matched:
            self.finish_reason = "length"
        elif self.num_calls:
            self.finish_reason = "tool_calls"
        else:
            self.finish_reason = "stop"
        return delta

    def _check(self, result: Completion) -> None:
        if result.finish_reason is FinishReason.ERROR:
            raise NonFiniteError(result.error)
        if result.finish_reason is FinishReason.ABORT:
            raise EngineError("the request was aborted")
