"""The living sandboxes of one state folder, and what every operation on them needs: store, backends, leases,
turns, metrics, tasks.

Decides nothing about lives; tidemill.sandbox.orchestrator does.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping
from typing import Any, TypeVar

from tidemill.core.clock import Clock, SystemClock
from tidemill.core.errors import (
    BusyError,
    MissingCapabilityError,
    NotFoundError,
    SandboxDiedError,
    SandboxError,
    SetupError,
    TidemillError,
)
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.backends.base import Backend, Guest
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.entry import Entry
from tidemill.sandbox.leases import Leases
from tidemill.sandbox.lifecycle import dead_error
from tidemill.sandbox.metrics import Metrics
from tidemill.sandbox.queueing import FairQueue
from tidemill.sandbox.store import SandboxRow, Store

log = logging.getLogger(__name__)
T = TypeVar("T")


class Roster:
    """See the module. Belongs to one event loop; the store belongs to it.

    heavy, kills  turns for starting and for ending guests
    unavailable   backends this machine lacks something for, with the error that says what
    """

    def __init__(self, config: ServiceConfig, store: Store, backends: Mapping[str, Backend], *,
                 clock: Clock | None = None, metrics: Metrics | None = None) -> None:
        self.config = config
        self.store = store
        self.backends = dict(backends)
        self.unavailable: dict[str, tuple[Backend, SetupError]] = {}
        self.clock = clock or SystemClock()
        self.metrics = metrics or Metrics()
        self.leases = Leases(store, self.clock, grace_s=config.lease_grace_s)
        self.heavy = FairQueue(config.workers)
        self.kills = FairQueue(2 * config.workers)
        self.entries: dict[str, Entry] = {}
        self.stopping = False
        self._tasks: set[asyncio.Task[Any]] = set()

    # ---- looking

    def entry(self, sandbox_id: str) -> Entry:
        """The living sandbox. Raises SandboxDiedError for one that has ended, NotFoundError for one never known."""
        found = self.entries.get(sandbox_id)
        if found is None:
            row = self.store.get(sandbox_id)
            raise dead_error(sandbox_id, row.reason)
        return found

    def rows(self, *, lease: str = "", metadata: Mapping[str, str] | None = None) -> list[SandboxRow]:
        """Living sandboxes, oldest first; `metadata` pairs must all match."""
        wanted = dict(metadata or {}).items()
        rows = [e.row for e in self.entries.values()
                if (not lease or e.row.lease == lease) and wanted <= dict(e.row.metadata).items()]
        return sorted(rows, key=lambda r: (r.created_at, r.sandbox_id))

    def backend(self, name: str) -> Backend:
        """By name; the empty name is the service's default. Raises NotFoundError listing what there is, or
        the SetupError that keeps it from running here."""
        name = name or self.config.backend
        if name in self.unavailable:
            raise self.unavailable[name][1]
        if name not in self.backends:
            raise NotFoundError(f"no backend {name!r} in this service.",
                                remedy=f"It has: {', '.join(sorted({*self.backends, *self.unavailable})) or 'none'}.")
        return self.backends[name]

    async def add_backend(self, backend: Backend) -> None:
        """Start a backend. One that this machine lacks something for is kept aside and tried again when asked for."""
        try:
            await backend.start()
        except SetupError as e:
            log.warning("backend %s is not available: %s", backend.name, e)
            self.unavailable[backend.name] = (backend, e)
        else:
            self.unavailable.pop(backend.name, None)
            self.backends[backend.name] = backend

    # ---- shared by the operations

    def check_room(self, count: int) -> None:
        alive, limit = len(self.entries), self.config.max_sandboxes
        if alive + count > limit:
            raise BusyError(f"{alive} sandboxes are alive, {count} more were asked for and {limit} is the limit.",
                            remedy="Kill some first.")

    def check_wanted(self, entry: Entry) -> None:
        if entry.doomed:
            raise SandboxDiedError(f"sandbox {entry.row.sandbox_id} is ending ({entry.doomed}).")

    def guest(self, entry: Entry, capability: str = "") -> Guest:
        """The guest of a living sandbox whose backend has `capability` (pause, fork)."""
        self.check_wanted(entry)
        if capability and not getattr(self.backend(entry.row.backend).capabilities(), capability):
            raise MissingCapabilityError(f"backend {entry.row.backend} cannot {capability}.",
                                         remedy="GET /x/v1/capabilities says what each backend can do.")
        if entry.guest is None:
            raise SandboxDiedError(f"sandbox {entry.row.sandbox_id} has no guest.")
        return entry.guest

    def result(self, entry: Entry, state: SandboxState, intent: int, outcome: str, *, event: str = "",
                **changes: Any) -> None:
        """Write how an operation on a living sandbox ended. If that cannot be written, store and machine have
        come apart, and the only safe move left is the end."""
        try:
            entry.row, _ = self.store.move(entry.row, state, result_of=intent, outcome=outcome, event=event, **changes)
        except SandboxError as e:
            entry.doomed = entry.doomed or f"its state could not be recorded: {e.message}"
            raise

    def note(self, intent: int, outcome: str) -> None:
        """End an operation that leaves its sandbox as it was. Failing to write that harms nothing but the history."""
        try:
            self.store.finish(intent, outcome)
        except SandboxError as e:
            log.error("operation %d (%s) could not be recorded: %s", intent, outcome, e)
            self.metrics.failure("store")

    # ---- tasks

    def spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Run to the end whatever happens to the caller; failures are logged."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    async def settle(self, timeout_s: float) -> None:
        """Wait for running operations; cancel what is left after `timeout_s` (recovery will undo it)."""
        self.stopping = True
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=timeout_s)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late, timeout=5.0)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("operation failed: %s", error, exc_info=None if isinstance(error, TidemillError) else error)

    async def detached(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        """Await work that goes on even if the caller is cancelled."""

        async def whole() -> T:
            return await work

        return await asyncio.shield(self.spawn(whole()))
