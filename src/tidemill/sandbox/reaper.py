"""Ends what nobody wants any more: sandboxes past their time, sandboxes of owners that are gone, and
sandboxes whose end failed before. Also moves the store's log into its file and forgets old history.

One pass is quick and starts the ends as tasks, so a sandbox that resists delays no other.
"""

from __future__ import annotations

import asyncio
import logging

from tidemill.core.errors import SandboxError
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.orchestrator import Orchestrator
from tidemill.sandbox.store import LeaseRow, SandboxRow

log = logging.getLogger(__name__)

RETRY_S = 5.0
HOUSEKEEPING_S = 30.0


class Reaper:
    """`run()` until cancelled, or `look()` once."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._tried: dict[str, float] = {}
        self._kept_house = orchestrator.clock.monotonic()

    async def run(self) -> None:
        """A pass every `reap_interval_s`. A pass that fails (the store's disk is full) is logged and the next
        one comes."""
        while True:
            await asyncio.sleep(self._orchestrator.config.reap_interval_s)
            try:
                self.look()
                await self._keep_house()
            except SandboxError as e:
                log.error("reaper: %s", e)
                self._orchestrator.metrics.failure("reaper")

    def look(self) -> list[asyncio.Task[int]]:
        """One pass; returns the tasks it started."""
        orchestrator = self._orchestrator
        tasks: list[asyncio.Task[int]] = []
        for lease in orchestrator.leases.expired():
            reason = f"lease {lease.lease} lost: {_why(lease)}"
            rows = orchestrator.rows(lease=lease.lease)
            log.warning("%s; ending its %d sandboxes", reason, len(rows))
            orchestrator.metrics.reaped("lease", len(rows))
            tasks.append(orchestrator.spawn(orchestrator.release_lease(lease.lease, reason=reason)))
        now = orchestrator.clock.wall()
        expired = [e.row for e in orchestrator.entries.values()
                   if not e.doomed and e.row.expires_at <= now
                   and e.row.state in (SandboxState.RUNNING, SandboxState.PAUSED)]
        if expired:
            orchestrator.metrics.reaped("expired", len(expired))
            tasks.append(orchestrator.spawn(orchestrator.kill_many(expired, reason="expired")))
        if again := self._resisting():
            tasks.append(orchestrator.spawn(orchestrator.kill_many(again, reason="tried again")))
        return tasks

    def _resisting(self) -> list[SandboxRow]:
        orchestrator = self._orchestrator
        now = orchestrator.clock.monotonic()
        waiting = {i: e for i, e in orchestrator.entries.items() if e.doomed and not e.lock.locked()}
        self._tried = {i: self._tried.get(i, now) for i in waiting}
        due = [e.row for i, e in waiting.items() if now - self._tried[i] >= RETRY_S]
        for row in due:
            self._tried[row.sandbox_id] = now
        return due

    async def _keep_house(self) -> None:
        orchestrator = self._orchestrator
        now = orchestrator.clock.monotonic()
        if now - self._kept_house < HOUSEKEEPING_S:
            return
        self._kept_house = now
        orchestrator.store.forget_dead(orchestrator.clock.wall() - orchestrator.config.history_s)
        await asyncio.to_thread(orchestrator.store.checkpoint)


def _why(lease: LeaseRow) -> str:
    if lease.owner_pid is not None:
        return f"its owner, process {lease.owner_pid}, is gone or silent"
    return f"no heartbeat for {lease.ttl_s:g} s"
