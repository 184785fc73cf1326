"""Fair turns for heavy work: a bounded number of workers, handed out to leases in rotation.

Starting, restoring and forking sandboxes is bound by the processor, so running more of them at once only
makes all of them late. One lease that asks for 256 must not make another wait for all of those: each free
worker goes to the next lease in turn, and within a lease to the oldest request.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tidemill.core.errors import BusyError


class FairQueue:
    """`workers` turns at once; at most `max_waiting` requests wait, the next is refused with BusyError."""

    def __init__(self, workers: int, *, max_waiting: int = 4096) -> None:
        if workers < 1:
            raise ValueError(f"workers = {workers}: expected at least 1")
        self.workers = workers
        self.active = 0
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @property
    def waiting(self) -> int:
        """Requests without a turn."""
        return sum(len(q) for q in self._waiting.values())

    @asynccontextmanager
    async def turn(self, lease: str) -> AsyncIterator[None]:
        """Wait for a turn of `lease` and hold it inside the block. Cancelling while waiting gives up the place."""
        await self._acquire(lease)
        try:
            yield
        finally:
            self._release()

    async def _acquire(self, lease: str) -> None:
        if self.active < self.workers and not self._waiting:
            self.active += 1
            return
        if self.waiting >= self._max_waiting:
            raise BusyError(f"{self.waiting} operations are waiting already.", remedy="Ask for fewer at once.")
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(lease, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            else:
                self._forget(lease, turn)
            raise

    def _release(self) -> None:
        self.active -= 1
        while self._waiting and self.active < self.workers:
            lease, queue = self._waiting.popitem(last=False)
            turn = queue.popleft()
            if queue:
                self._waiting[lease] = queue
            if not turn.done():
                self.active += 1
                turn.set_result(None)

    def _forget(self, lease: str, turn: asyncio.Future[None]) -> None:
        queue = self._waiting.get(lease)
        if queue is not None and turn in queue:
            queue.remove(turn)
            if not queue:
                del self._waiting[lease]
