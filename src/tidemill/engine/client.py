"""Async clients of an engine: one base class that keeps track of calls, and the engine embedded in a thread.

The client side is thread-safe and not tied to one event loop: each call notes the loop it was made on and its answers
are delivered there, so a program may run several loops one after another.
"""

from __future__ import annotations

import asyncio
import itertools
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from tidemill.core.engine_api import (
    AdapterConfig,
    Completion,
    EngineInfo,
    GenerateRequest,
    SleepReport,
    TokenEvent,
)
from tidemill.core.errors import EngineError, TidemillError
from tidemill.core.manifest import AdapterManifest
from tidemill.engine import messages as m
from tidemill.engine.core import EngineCore


@dataclass(slots=True)
class _Call:
    loop: asyncio.AbstractEventLoop
    replies: asyncio.Queue[m.Reply] | None
    future: asyncio.Future[m.Value]


class InboxClient(ABC):
    """EngineClient over anything that takes messages and hands back replies. Subclasses implement `_post` and call
    `_deliver` (from any thread) and, when the engine is gone, `_fail_all`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._ids = itertools.count(1)
        self._dead: TidemillError | None = None

    async def info(self) -> EngineInfo:
        return cast("EngineInfo", await self._call(m.Info))

    async def generate(self, request: GenerateRequest) -> Completion:
        return cast("Completion", await self._call(m.Generate, request, False))

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenEvent | Completion]:
        call_id, call = self._open(streaming=True)
        assert call.replies is not None
        finished = False
        try:
            self._post(m.Generate(call_id, request, True))
            while not finished:
                reply = await call.replies.get()
                if isinstance(reply, m.Token):
                    yield reply.event
                    continue
                finished = True
                if isinstance(reply, m.Failure):
                    raise reply.error
                yield cast("Completion", reply.value)
        finally:
            if not finished:
                self._cancel(call_id)

    async def score(self, ids: Sequence[int], *, temperature: float = 1.0) -> tuple[float, ...]:
        return cast("tuple[float, ...]", await self._call(m.Score, tuple(ids), temperature))

    async def open_session(self, session_id: str) -> None:
        await self._call(m.OpenSession, session_id)

    async def close_session(self, session_id: str) -> None:
        await self._call(m.CloseSession, session_id)

    async def abort(self, request_id: str) -> None:
        await self._call(m.Abort, request_id)

    async def begin_adapter(self, manifest: AdapterManifest, config: AdapterConfig, *, num_chunks: int) -> None:
        await self._call(m.BeginAdapter, manifest.to_json(), config, num_chunks)

    async def adapter_chunk(self, index: int, names: Sequence[str], data: bytes) -> None:
        await self._call(m.AdapterChunk, index, tuple(names), data)

    async def commit_adapter(self, version: int) -> str:
        return cast("str", await self._call(m.CommitAdapter, version))

    async def abort_adapter(self) -> None:
        await self._call(m.AbortAdapter)

    async def sleep(self, tags: Sequence[str] = ("pools", "derived")) -> SleepReport:
        return cast("SleepReport", await self._call(m.Sleep, tuple(tags)))

    async def wake(self, tags: Sequence[str] = ("pools", "derived")) -> SleepReport:
        return cast("SleepReport", await self._call(m.Wake, tuple(tags)))

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def _post(self, message: m.Message) -> None:
        """Hand a message to the engine without blocking for its answer. Raises EngineError if it is gone."""

    async def _call(self, kind: Callable[..., m.Message], *args: Any) -> m.Value:
        call_id, call = self._open(streaming=False)
        try:
            self._post(kind(call_id, *args))
            return await call.future
        finally:
            if not call.future.done() or call.future.cancelled():
                self._cancel(call_id)

    def _open(self, *, streaming: bool) -> tuple[int, _Call]:
        loop = asyncio.get_running_loop()
        call = _Call(loop, asyncio.Queue() if streaming else None, loop.create_future())
        with self._lock:
            if self._dead is not None:
                raise self._dead
            call_id = next(self._ids)
            self._calls[call_id] = call
        return call_id, call

    def _cancel(self, call_id: int) -> None:
        """Forget a call nobody waits for and tell the engine to stop working on it."""
        with self._lock:
            known = self._calls.pop(call_id, None)
            if known is None or self._dead is not None:
                return
            cancel_id = next(self._ids)
        self._post(m.Cancel(cancel_id, call_id))

    def _deliver(self, replies: Sequence[m.Reply]) -> None:
        """Hand replies to their callers, one hop per loop. Any thread."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Call, m.Reply]]] = {}
        with self._lock:
            for reply in replies:
                final = not isinstance(reply, m.Token)
                call = self._calls.pop(reply.call_id, None) if final else self._calls.get(reply.call_id)
                if call is not None:
                    by_loop.setdefault(call.loop, []).append((call, reply))
        for loop, pairs in by_loop.items():
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, pairs)

    def _fail_all(self, error: TidemillError) -> None:
        """The engine is gone: every open call and every later one raises `error`."""
        with self._lock:
            if self._dead is None:
                self._dead = error
            open_calls = list(self._calls)
        self._deliver([m.Failure(call_id, error) for call_id in open_calls])


def _settle(pairs: list[tuple[_Call, m.Reply]]) -> None:
    for call, reply in pairs:
        if call.replies is not None:
            call.replies.put_nowait(reply)
        elif call.future.done():
            continue
        elif isinstance(reply, m.Failure):
            call.future.set_exception(reply.error)
        elif isinstance(reply, m.Result):
            call.future.set_result(reply.value)


class EmbeddedEngine(InboxClient):
    """An EngineCore in a thread of this process. The thread is the only one that touches the core.

    `build` makes the core inside the thread; its errors are raised by the constructor. Close it, or use it as an async
    context manager.
    """

    def __init__(self, build: Callable[[], EngineCore]) -> None:
        super().__init__()
        self._inbox: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()
        self._build = build
        started: queue.SimpleQueue[TidemillError | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(started,), name="tidemill-engine", daemon=True)
        self._thread.start()
        error = started.get()
        if error is not None:
            self._thread.join()
            raise error

    async def __aenter__(self) -> EmbeddedEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop the thread; open calls raise EngineError. Idempotent."""
        self.shutdown()

    def shutdown(self) -> None:
        """`close` for synchronous callers."""
        self._inbox.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, message: m.Message) -> None:
        self._inbox.put(message)

    def _run(self, started: queue.SimpleQueue[TidemillError | None]) -> None:
        reason = "the engine stopped on an unexpected error; its traceback is on stderr"
        ready = False
        try:
            try:
                core = self._build()
            except TidemillError as e:
                reason = str(e)
                started.put(e)
                return
            ready = True
            started.put(None)
            if run_core(core, self._inbox, self._deliver):
                reason = "the engine was closed"
        finally:
            if not ready and reason.startswith("the engine stopped"):
                started.put(EngineError(reason))
            self._fail_all(EngineError(reason))


def run_core(
    core: EngineCore, inbox: queue.SimpleQueue[m.Message | None], deliver: Callable[[Sequence[m.Reply]], None],
) -> bool:
    """The engine's loop: take what is in the inbox, step, hand out replies; sleep on the inbox when there is no work.
    Returns True when the inbox says None."""
    while True:
        block = not core.has_work
        while True:
            try:
                message = inbox.get(block)
            except queue.Empty:
                break
            if message is None:
                return True
            core.submit(message)
            block = False
        replies = core.step()
        if replies:
            deliver(replies)
