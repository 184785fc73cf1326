"""Sandboxes lent to episodes: made once under a lease, exclusive while lent, reset between uses, replaced if that
fails.

Resetting and opening live sessions happen in the background after a release, so that an episode finds its bench ready.
Leaving the pool ends every sandbox of the lease, also when the leaving task was cancelled.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from tidemill.agent.tool import Bench, ToolLimits
from tidemill.core.config import require
from tidemill.core.errors import SandboxError, TidemillError
from tidemill.core.sandbox_api import LiveSession, Sandbox, SandboxClient

log = logging.getLogger(__name__)

_REPLACE_TRIES = 3


@dataclass(slots=True)
class PoolStats:
    """Counts since the pool was entered. Times in seconds."""

    sandboxes_used: int = 0
    """Distinct sandboxes that were lent at least once."""
    uses: int = 0
    resets: int = 0
    replaced: int = 0
    """Sandboxes given up because they failed a reset or died."""
    wait_s: float = 0.0
    """Time episodes waited for a free sandbox, summed."""
    reset_s: float = 0.0
    tool_calls: int = 0
    tool_s: float = 0.0
    tool_max_s: float = 0.0

    def note_tool(self, seconds: float) -> None:
        """Count one tool call."""
        self.tool_calls += 1
        self.tool_s += seconds
        self.tool_max_s = max(self.tool_max_s, seconds)


class SandboxPool:
    """`async with SandboxPool(client, size=32, lease=run_id) as pool`, then `async with pool.lend() as bench`.

    client    used, not closed
    lease     of this pool alone: leaving the pool kills whatever belongs to it
    sessions  kinds of live session opened ahead of each use
    """

    def __init__(self, client: SandboxClient, *, size: int, lease: str, template: str = "base", backend: str = "",
                 sessions: Sequence[str] = (), limits: ToolLimits | None = None, lifetime_s: float = 86_400.0) -> None:
        require(size >= 1, field="pool", value=size, expected="at least one sandbox")
        require(bool(lease), field="lease", value=lease, expected="a name of its own, so that nothing is left over")
        self.stats = PoolStats()
        self._client, self._size, self._lease = client, size, lease
        self._template, self._backend, self._lifetime_s = template, backend, lifetime_s
        self._sessions, self._limits = tuple(sessions), limits or ToolLimits()
        self._ready: deque[Bench] = deque()
        self._waiting: deque[asyncio.Future[Bench]] = deque()
        self._lent: set[Bench] = set()
        self._used: set[str] = set()
        self._background: set[asyncio.Task[Any]] = set()
        self._alive = 0
        self._broken: TidemillError | None = None
        self._closed = False

    async def __aenter__(self) -> SandboxPool:
        """Make all sandboxes. On any failure none is left."""
        tasks = [asyncio.ensure_future(self._make()) for _ in range(self._size)]
        try:
            benches = await asyncio.gather(*tasks)
        except BaseException:
            self._background.update(tasks)
            await self.close()
            raise
        self._alive = self._size
        self._ready.extend(benches)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    @property
    def free(self) -> int:
        """Sandboxes ready to be lent now."""
        return len(self._ready)

    @property
    def lent(self) -> int:
        """Sandboxes in the hands of episodes."""
        return len(self._lent)

    async def acquire(self) -> Bench:
        """A bench nobody else has, in the template's state; first come, first served. Raises SandboxError if the pool
        is closed or every sandbox was lost."""
        self._check()
        if self._ready and not self._waiting:
            bench = self._ready.popleft()
        else:
            bench = await self._wait()
        self._lend(bench)
        return bench

    def release(self, bench: Bench) -> None:
        """Give a bench back; it is reset in the background. Idempotent."""
        if bench not in self._lent:
            return
        self._lent.discard(bench)
        if not self._closed:
            self._spawn(self._renew(bench))

    @asynccontextmanager
    async def lend(self) -> AsyncIterator[Bench]:
        """`acquire`, and `release` whatever happens."""
        bench = await self.acquire()
        try:
            yield bench
        finally:
            self.release(bench)

    async def settle(self) -> None:
        """Wait until no reset is under way."""
        while self._background:
            await asyncio.wait(set(self._background))

    async def close(self) -> None:
        """End every sandbox of the lease. Idempotent; a cancelled caller is cancelled after the work is done."""
        if self._closed:
            return
        self._closed = True
        ending = asyncio.ensure_future(self._end())
        cancelled = False
        while not ending.done():
            try:
                await asyncio.shield(ending)
            except asyncio.CancelledError:
                cancelled = True
                if ending.cancelled():
                    break
        if cancelled:
            raise asyncio.CancelledError
        ending.result()

    # -- inside ---------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        self._fail_waiting(SandboxError("the sandbox pool was closed"))
        for task in self._background:
            task.cancel()
        if self._background:
            await asyncio.wait(set(self._background))
        self._ready.clear()
        self._lent.clear()
        await self._client.release_lease(self._lease)

    def _check(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox pool was closed")
        if self._broken is not None:
            raise SandboxError(f"no sandbox is left in the pool: {self._broken}")

    async def _wait(self) -> Bench:
        loop = asyncio.get_running_loop()
        start = loop.time()
        turn: asyncio.Future[Bench] = loop.create_future()
        self._waiting.append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # Handed over and cancelled in the same tick: it goes to the next in line, still unused.
                self._offer(turn.result())
            raise
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)
            self.stats.wait_s += loop.time() - start

    def _lend(self, bench: Bench) -> None:
        self._lent.add(bench)
        self._used.add(bench.sandbox.sandbox_id)
        self.stats.uses += 1
        self.stats.sandboxes_used = len(self._used)

    def _offer(self, bench: Bench) -> None:
        if self._closed:
            return
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(bench)
                return
        self._ready.append(bench)

    def _fail_waiting(self, error: TidemillError) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_exception(error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def _make(self) -> Bench:
        sandbox = await self._client.create(template=self._template, backend=self._backend, lease=self._lease,
                                            timeout_s=self._lifetime_s)
        return await self._furnish(sandbox)

    async def _furnish(self, sandbox: Sandbox) -> Bench:
        sessions: dict[str, LiveSession] = {}
        for kind in self._sessions:
            sessions[kind] = await sandbox.open_session(kind)
        return Bench(sandbox, sessions, self._limits)

    async def _renew(self, bench: Bench) -> None:
        """Reset a used sandbox, or give it up and make a new one; the pool shrinks only if that fails repeatedly."""
        loop = asyncio.get_running_loop()
        start = loop.time()
        try:
            await bench.sandbox.reset()
            fresh = await self._furnish(bench.sandbox)
        except TidemillError as e:
            log.warning("sandbox %s is replaced: %s", bench.sandbox.sandbox_id, e)
            self.stats.replaced += 1
            await self._replace(bench.sandbox)
            return
        self.stats.resets += 1
        self.stats.reset_s += loop.time() - start
        self._offer(fresh)

    async def _replace(self, sandbox: Sandbox) -> None:
        try:
            await sandbox.kill()
        except TidemillError as e:
            log.warning("sandbox %s could not be ended now; its lease ends it: %s", sandbox.sandbox_id, e)
        failure: TidemillError | None = None
        for attempt in range(_REPLACE_TRIES):
            try:
                self._offer(await self._make())
            except TidemillError as e:
                log.warning("making a replacement failed (%d of %d): %s", attempt + 1, _REPLACE_TRIES, e)
                failure = e
                await asyncio.sleep(0.05 * 2**attempt)
            else:
                return
        self._alive -= 1
        if self._alive == 0:
            self._broken = failure
            self._fail_waiting(SandboxError(f"no sandbox is left in the pool: {failure}"))
