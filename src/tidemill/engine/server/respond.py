"""Running choices to their end or as a stream of server-sent events, and giving up when the client has gone."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from sse_starlette import EventSourceResponse
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tidemill.core.errors import TidemillError
from tidemill.engine.choice import Choice, Delta
from tidemill.engine.server.context import ServerContext
from tidemill.engine.server.errors import HttpError, error_body

T = TypeVar("T")

Chunk = dict[str, Any]


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Await `work`; if the client goes away first, cancel it (which aborts its engine requests)."""
    task = asyncio.ensure_future(work)
    gone = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise HttpError("the client closed the connection", status=499, code="client_closed")
    finally:
        for t in (task, gone):
            t.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def collect(choice: Choice, context: ServerContext) -> Delta:
    """All deltas of a choice joined."""
    started = time.monotonic()
    whole = Delta()
    first = True
    async with aclosing(choice.deltas()) as deltas:
        async for delta in deltas:
            if first:
                context.metrics.first_token.observe(time.monotonic() - started)
                first = False
            whole.content += delta.content
            whole.reasoning += delta.reasoning
            whole.calls += delta.calls
            whole.tokens += delta.tokens
    return whole


async def gather_choices(choices: Sequence[Choice], context: ServerContext) -> list[Delta]:
    """All choices at once; the first error cancels the others and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(collect(choice, context)) for choice in choices]
    except BaseExceptionGroup as e:
        raise e.exceptions[0] from e
    return [task.result() for task in tasks]


async def merge(choices: Sequence[Choice], context: ServerContext) -> AsyncIterator[tuple[int, Delta | None]]:
    """(choice index, delta) as they come from all choices; (index, None) when one ended. Raises what one raises."""
    queue: asyncio.Queue[tuple[int, Delta | BaseException | None]] = asyncio.Queue()

    async def pump(index: int, choice: Choice) -> None:
        started = time.monotonic()
        first = True
        try:
            async with aclosing(choice.deltas()) as deltas:
                async for delta in deltas:
                    if first:
                        context.metrics.first_token.observe(time.monotonic() - started)
                        first = False
                    queue.put_nowait((index, delta))
        except TidemillError as e:
            queue.put_nowait((index, e))
            return
        queue.put_nowait((index, None))

    tasks = [asyncio.create_task(pump(i, choice)) for i, choice in enumerate(choices)]
    try:
        left = len(tasks)
        while left:
            index, item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            left -= item is None
            yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def event_stream(request: Request, context: ServerContext, chunks: AsyncGenerator[Chunk]) -> Response:
    """An SSE response of JSON chunks ending in [DONE].

    The first chunk is awaited before the response starts, so that an error up to then keeps its status code; a later
    one becomes an `error` event and ends the stream. However the response ends, `chunks` is closed.
    """
    first = await while_connected(request, anext(chunks))

    async def events() -> AsyncIterator[dict[str, str]]:
        yield {"data": json.dumps(first, ensure_ascii=False)}
        try:
            async for chunk in chunks:
                yield {"data": json.dumps(chunk, ensure_ascii=False)}
        except TidemillError as e:
            yield {"data": json.dumps(error_body(e)[1], ensure_ascii=False)}
            return
        yield {"data": "[DONE]"}

    return _ClosingEvents(chunks, events(), ping=context.limits.keep_alive_s, sep="\n")


class _ClosingEvents(EventSourceResponse):
    """Closes the generator behind the events even if the client left between two of them."""

    def __init__(self, chunks: AsyncGenerator[Chunk], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._chunks.aclose()


async def _disconnected(request: Request) -> None:
    """Return when the client closes. The body has been read, so the next message can only be that."""
    while (await request.receive())["type"] != "http.disconnect":
        continue
