"""The life of sandboxes: create, pause, resume, fork, reset, kill, each first a row in the store.

Every operation writes its intent, works, and writes its result; it runs in a task of its own, so a caller who
goes away never leaves it half done. Heavy work (starting and forking guests) takes fair turns per lease. The
operations themselves are tidemill.sandbox.births, .changes and .endings. Using a sandbox is
tidemill.sandbox.usage, finding sandboxes again after a crash tidemill.sandbox.recovery, ending what has expired
tidemill.sandbox.reaper. HTTP is not known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tidemill.core.clock import Clock
from tidemill.core.errors import SandboxDiedError, TidemillError
from tidemill.sandbox.backends.base import Backend
from tidemill.sandbox.births import Births, CreateSpec
from tidemill.sandbox.changes import Changes, ResetDone
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.endings import Endings
from tidemill.sandbox.lifecycle import Operation
from tidemill.sandbox.metrics import Metrics
from tidemill.sandbox.roster import Roster
from tidemill.sandbox.store import SandboxRow, Store

__all__ = ["CreateSpec", "Orchestrator", "ResetDone"]

log = logging.getLogger(__name__)
T = TypeVar("T")


class Orchestrator(Roster):
    """The service without its surface: every operation callers may ask for, by id."""

    def __init__(self, config: ServiceConfig, store: Store, backends: Mapping[str, Backend], *,
                 clock: Clock | None = None, metrics: Metrics | None = None) -> None:
        super().__init__(config, store, backends, clock=clock, metrics=metrics)
        self.endings = Endings(self)
        self.changes = Changes(self, self.endings)
        self.births = Births(self, self.endings)

    async def create(self, spec: CreateSpec) -> SandboxRow:
        """Start a sandbox from a template and return it running."""
        await self.births.check_spec(spec)
        return await self.detached(self.births.create(self.births.admit(spec, 1)[0], spec))

    async def create_many(self, spec: CreateSpec, count: int) -> list[SandboxRow | TidemillError]:
        """`count` sandboxes; one entry per sandbox, in order. A failed one does not harm the others."""
        await self.births.check_spec(spec)
        entries = self.births.admit(spec, count)
        work = asyncio.gather(*(self.births.create(e, spec) for e in entries), return_exceptions=True)
        done = await self.detached(work)
        return [_row_or_error(d) for d in done]

    async def pause(self, sandbox_id: str) -> SandboxRow:
        """Freeze it in memory."""
        return await self.detached(self.changes.freeze(self.entry(sandbox_id), Operation.PAUSE))

    async def resume(self, sandbox_id: str, *, timeout_s: float | None = None) -> SandboxRow:
        """Let it go on; `timeout_s` sets a new end."""
        row = await self.detached(self.changes.freeze(self.entry(sandbox_id), Operation.RESUME))
        return row if timeout_s is None else self.set_timeout(sandbox_id, timeout_s)

    async def fork(self, sandbox_id: str, count: int, *, timeout_s: float | None = None
                   ) -> list[SandboxRow | TidemillError]:
        """Copies that go on from this state, one entry per copy. Raises what concerns the source itself."""
        return await self.detached(self.births.fork(self.entry(sandbox_id), count, timeout_s))

    async def reset(self, sandbox_id: str) -> ResetDone:
        """Back to the template's state, from inside the guest if it can vouch for that, else with a new guest."""
        return await self.detached(self.changes.reset(self.entry(sandbox_id)))

    async def kill(self, sandbox_id: str, *, reason: str = "killed") -> bool:
        """End it. False if it had ended before. Raises NotFoundError; SandboxError if it resists (it is tried
        again)."""
        try:
            entry = self.entry(sandbox_id)
        except SandboxDiedError:
            return False
        entry.doomed = entry.doomed or reason
        return await self.detached(self.endings.kill(entry))

    async def kill_many(self, rows: Sequence[SandboxRow], *, reason: str) -> int:
        """End several; returns how many ended now. Those that resist are logged and tried again by the reaper."""
        for row in rows:
            if found := self.entries.get(row.sandbox_id):
                found.doomed = found.doomed or reason
        done = await asyncio.gather(*(self.kill(r.sandbox_id, reason=reason) for r in rows), return_exceptions=True)
        results = [_value_or_error(d) for d in done]
        for row, result in zip(rows, results, strict=True):
            if isinstance(result, TidemillError):
                log.error("killing %s (%s): %s", row.sandbox_id, reason, result)
        return sum(result is True for result in results)

    def set_timeout(self, sandbox_id: str, timeout_s: float) -> SandboxRow:
        """It ends `timeout_s` from now."""
        entry = self.entry(sandbox_id)
        entry.row, _ = self.store.move(entry.row, entry.row.state, expires_at=self.clock.wall() + timeout_s)
        return entry.row

    async def release_lease(self, lease: str, *, reason: str = "lease released") -> int:
        """End every sandbox of the lease and forget it. Returns how many there were."""
        self.leases.forget(lease)
        rows = self.rows(lease=lease)
        await self.kill_many(rows, reason=reason)
        return len(rows)


def _value_or_error(result: T | BaseException) -> T | TidemillError:
    if isinstance(result, BaseException) and not isinstance(result, TidemillError):
        raise result
    return result


def _row_or_error(result: SandboxRow | BaseException) -> SandboxRow | TidemillError:
    return _value_or_error(result)
