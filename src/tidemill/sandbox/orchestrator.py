"""The life of sandboxes: create, pause, resume, fork, reset, kill, each first a row in the store.

Every operation writes its intent, works, and writes its result; it runs in a task of its own, so a caller who goes away
never leaves it half done. Heavy work (starting and forking guests) takes fair turns per lease. Using a sandbox is
tidemill.sandbox.usage, finding sandboxes again after a crash tidemill.sandbox.recovery, ending what has expired
tidemill.sandbox.reaper. HTTP is not known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
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
from tidemill.core.ids import new_id
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.backends.base import Backend, Guest
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.entry import Entry, LiveSession
from tidemill.sandbox.leases import Leases
from tidemill.sandbox.lifecycle import Operation, check_start, dead_error
from tidemill.sandbox.metrics import Metrics
from tidemill.sandbox.queueing import FairQueue
from tidemill.sandbox.store import SandboxRow, Store
from tidemill.sandbox.store.records import SessionRow

log = logging.getLogger(__name__)
S = SandboxState
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSpec:
    """What to create. `timeout_s` counts from the moment it runs."""

    template: str = "base"
    backend: str = ""
    lease: str = ""
    timeout_s: float = 300.0
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetDone:
    """How a reset was done: `in_guest`, or `replaced` by a new guest under the same id (generation + 1), and why."""

    how: str
    row: SandboxRow
    detail: str = ""


class Orchestrator:
    """All living sandboxes of one state folder. Belongs to one event loop; the store belongs to it."""

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
        """By name; the empty name is the service's default. Raises NotFoundError listing what there is, or the SetupError
        that keeps it from running here."""
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

    # ---- life

    async def create(self, spec: CreateSpec) -> SandboxRow:
        """Start a sandbox from a template and return it running."""
        await self._check_spec(spec)
        return await self._detached(self._create(self._admit(spec, 1)[0], spec))

    async def create_many(self, spec: CreateSpec, count: int) -> list[SandboxRow | TidemillError]:
        """`count` sandboxes; one entry per sandbox, in order. A failed one does not harm the others."""
        await self._check_spec(spec)
        entries = self._admit(spec, count)
        done = await self._detached(asyncio.gather(*(self._create(e, spec) for e in entries), return_exceptions=True))
        return [_row_or_error(d) for d in done]

    async def pause(self, sandbox_id: str) -> SandboxRow:
        """Freeze it in memory."""
        return await self._detached(self._freeze(self.entry(sandbox_id), Operation.PAUSE))

    async def resume(self, sandbox_id: str, *, timeout_s: float | None = None) -> SandboxRow:
        """Let it go on; `timeout_s` sets a new end."""
        row = await self._detached(self._freeze(self.entry(sandbox_id), Operation.RESUME))
        return row if timeout_s is None else self.set_timeout(sandbox_id, timeout_s)

    async def fork(self, sandbox_id: str, count: int, *, timeout_s: float | None = None
                   ) -> list[SandboxRow | TidemillError]:
        """Copies that go on from this state, one entry per copy. Raises what concerns the source itself."""
        return await self._detached(self._fork(self.entry(sandbox_id), count, timeout_s))

    async def reset(self, sandbox_id: str) -> ResetDone:
        """Back to the template's state, from inside the guest if it can vouch for that, else with a new guest."""
        return await self._detached(self._reset(self.entry(sandbox_id)))

    async def kill(self, sandbox_id: str, *, reason: str = "killed") -> bool:
        """End it. False if it had ended before. Raises NotFoundError; SandboxError if it resists (it is tried again)."""
        try:
            entry = self.entry(sandbox_id)
        except SandboxDiedError:
            return False
        entry.doomed = entry.doomed or reason
        return await self._detached(self._kill(entry))

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

    def found_dead(self, entry: Entry, error: TidemillError) -> None:
        """A call met SandboxDiedError: clean up behind it, in the background."""
        if entry.row.state is not S.DEAD and not entry.doomed:
            entry.doomed = f"found dead: {error.message}"
            self.spawn(self._kill(entry))

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

    async def _detached(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        async def whole() -> T:
            return await work

        return await asyncio.shield(self.spawn(whole()))

    # ---- the operations

    async def _check_spec(self, spec: CreateSpec) -> None:
        self.leases.check(spec.lease)
        aside = self.unavailable.get(spec.backend or self.config.backend)
        if aside is not None:
            await self.add_backend(aside[0])
        backend = self.backend(spec.backend)
        names = await backend.templates()
        if spec.template not in names:
            raise NotFoundError(f"no template {spec.template!r} for backend {backend.name}; it has: "
                                f"{', '.join(names) or 'none'}.",
                                remedy="`tidemill sandbox setup` makes the template `base`.")

    def _admit(self, spec: CreateSpec, count: int) -> list[Entry]:
        """Room for `count` more? Then one row and entry each, in `creating` (no guest yet)."""
        if self.stopping:
            raise BusyError("the sandbox service is stopping.")
        self._check_room(count)
        entries: list[Entry] = []
        try:
            for _ in range(count):
                entries.append(self._admit_one(spec))
        except SandboxError as e:
            for entry in entries:
                entry.doomed = f"its batch could not be recorded: {e.message}"  # the reaper ends it
            raise
        return entries

    def _check_room(self, count: int) -> None:
        alive, limit = len(self.entries), self.config.max_sandboxes
        if alive + count > limit:
            raise BusyError(f"{alive} sandboxes are alive, {count} more were asked for and {limit} is the limit.",
                            remedy="Kill some first.")

    def _admit_one(self, spec: CreateSpec, *, parent: SandboxRow | None = None, kind: Operation = Operation.CREATE) -> Entry:
        now = self.clock.wall()
        sandbox_id = new_id("sbx", now_ms=int(now * 1000))
        row = SandboxRow(
            sandbox_id=sandbox_id, template=spec.template, backend=self.backend(spec.backend).name, state=S.CREATING,
            lease=spec.lease, parent_id=parent.sandbox_id if parent else "", generation=0, created_at=now,
            expires_at=now + spec.timeout_s, metadata=spec.metadata, runtime_id=sandbox_id,
        )
        row, operation = self.store.insert(row, kind=kind.value)
        entry = Entry(row, operation=operation)
        self.entries[sandbox_id] = entry
        return entry

    async def _create(self, entry: Entry, spec: CreateSpec) -> SandboxRow:
        backend = self.backend(spec.backend)
        async with entry.alone("create"):
            started = self.clock.monotonic()
            try:
                async with self.heavy.turn(spec.lease):
                    self._check_wanted(entry)
                    guest = await backend.create(entry.row.runtime_id, spec.template)
                self._born(entry, guest, spec.timeout_s, event="created")
            except BaseException as e:
                await self._stillborn(entry, backend, e)
                raise
            self.metrics.operation("create", self.clock.monotonic() - started)
            return entry.row

    def _check_wanted(self, entry: Entry) -> None:
        if entry.doomed:
            raise SandboxDiedError(f"sandbox {entry.row.sandbox_id} is ending ({entry.doomed}).")

    def _born(self, entry: Entry, guest: Guest, timeout_s: float, *, event: str) -> None:
        entry.guest = guest
        entry.row, _ = self.store.move(
            entry.row, S.RUNNING, record=guest.record(), expires_at=self.clock.wall() + timeout_s,
            result_of=entry.operation, outcome="ok", event=event)

    async def _stillborn(self, entry: Entry, backend: Backend, error: BaseException) -> None:
        """Undo a start that failed."""
        reason = f"could not start: {error}" if isinstance(error, TidemillError) else "could not start"
        entry.doomed = entry.doomed or reason
        await self._wipe_and_bury(entry, backend, entry.operation, event="create_failed")

    async def _wipe_and_bury(self, entry: Entry, backend: Backend, operation: int, *, event: str) -> None:
        """Remove whatever exists, then the row, for `entry.doomed`. If either fails, the entry stays as it is and the reaper
        tries again."""
        try:
            await self._wipe(entry, backend)
            self._bury(entry, operation, outcome=f"failed: {entry.doomed}", event=event)
        except TidemillError as e:
            log.error("cannot remove %s: %s", entry.row.sandbox_id, e)
            self.metrics.failure("wipe")

    async def _wipe(self, entry: Entry, backend: Backend) -> None:
        """Nothing of the sandbox is left on the machine afterwards. A living guest knows best how to end itself."""
        if entry.guest is not None:
            await entry.guest.kill()
        else:
            await backend.destroy(entry.row.runtime_id)
        for runtime_id in entry.spare:
            await backend.destroy(runtime_id)

    def _bury(self, entry: Entry, operation: int, *, outcome: str, event: str) -> None:
        entry.row, _ = self.store.move(entry.row, S.DEAD, reason=entry.doomed, result_of=operation, outcome=outcome,
                                       event=event)
        entry.guest = None
        entry.sessions.clear()
        self.entries.pop(entry.row.sandbox_id, None)

    async def _freeze(self, entry: Entry, operation: Operation) -> SandboxRow:
        async with entry.alone(operation.value):
            moves = check_start(entry.row.sandbox_id, operation, entry.row.state, entry.row.reason)
            guest = self._guest(entry, "pause")
            entry.row, intent = self.store.move(entry.row, moves.during, intent=operation.value)
            try:
                await (guest.pause() if operation is Operation.PAUSE else guest.resume())
            except SandboxDiedError as e:
                self.found_dead(entry, e)
                raise
            except TidemillError as e:
                self._result(entry, moves.undone, intent, f"failed: {e}")
                raise
            self._result(entry, moves.done, intent, "ok", event=moves.done.value)
            await self.attach_sessions(entry, guest)
            return entry.row

    def _result(self, entry: Entry, state: SandboxState, intent: int, outcome: str, *, event: str = "",
                **changes: Any) -> None:
        """Write how an operation on a living sandbox ended. If that cannot be written, store and machine have come apart,
        and the only safe move left is the end."""
        try:
            entry.row, _ = self.store.move(entry.row, state, result_of=intent, outcome=outcome, event=event, **changes)
        except SandboxError as e:
            entry.doomed = entry.doomed or f"its state could not be recorded: {e.message}"
            raise

    async def attach_sessions(self, entry: Entry, guest: Guest) -> None:
        """Find the sessions in `entry.waiting` again; those that have ended meanwhile are forgotten."""
        if entry.row.state is not S.RUNNING:
            return
        while entry.waiting:
            row = entry.waiting.pop(0)
            try:
                session = await guest.attach_session(row.record)
            except NotFoundError:
                self.store.drop_sessions(row.sandbox_id, [row.session_id])
            else:
                entry.sessions[row.session_id] = LiveSession(row.session_id, session)

    async def _fork(self, entry: Entry, count: int, timeout_s: float | None) -> list[SandboxRow | TidemillError]:
        async with entry.alone("fork"), AsyncExitStack() as held:
            source = entry.row
            check_start(source.sandbox_id, Operation.FORK, source.state, source.reason)
            guest, backend = self._guest(entry, "fork"), self.backend(source.backend)
            started = self.clock.monotonic()
            self._check_room(count)
            left_s = source.expires_at - self.clock.wall() if timeout_s is None else timeout_s
            spec = CreateSpec(template=source.template, backend=source.backend, lease=source.lease,
                              timeout_s=max(left_s, 1.0), metadata=source.metadata)
            _, intent = self.store.move(source, source.state, intent="fork", detail={"count": count})
            children: list[Entry] = []
            try:
                for _ in range(count):
                    children.append(self._admit_one(spec, parent=source, kind=Operation.FORK))
                    await held.enter_async_context(children[-1].alone("fork"))
                async with self.heavy.turn(source.lease):
                    self._check_wanted(entry)
                    copies = await guest.fork([c.row.runtime_id for c in children])
            except BaseException as e:
                for child in children:
                    await self._stillborn(child, backend, e)
                self._note(intent, f"failed: {e}")
                if isinstance(e, SandboxDiedError):
                    self.found_dead(entry, e)
                raise
            results = [await self._adopt_copy(entry, child, copy, backend, spec)
                       for child, copy in zip(children, copies, strict=True)]
            bad = sum(isinstance(r, TidemillError) for r in results)
            self._note(intent, f"{count - bad} of {count}")
            self.metrics.operation("fork", self.clock.monotonic() - started)
            return results

    def _note(self, intent: int, outcome: str) -> None:
        """End an operation that leaves its sandbox as it was. Failing to write that harms nothing but the history."""
        try:
            self.store.finish(intent, outcome)
        except SandboxError as e:
            log.error("operation %d (%s) could not be recorded: %s", intent, outcome, e)
            self.metrics.failure("store")

    async def _adopt_copy(self, source: Entry, child: Entry, copy: Guest | TidemillError, backend: Backend,
                          spec: CreateSpec) -> SandboxRow | TidemillError:
        error: TidemillError
        if isinstance(copy, TidemillError):
            error = copy
        else:
            try:
                await self._inherit_sessions(source, child, copy)
                self._born(child, copy, spec.timeout_s, event="forked")
                return child.row
            except TidemillError as e:
                child.guest, error = copy, e
        await self._stillborn(child, backend, error)
        return error

    async def _inherit_sessions(self, source: Entry, child: Entry, copy: Guest) -> None:
        """The copy has its source's idle sessions, under the same ids. (In a busy one, the cell that ran goes on in the copy,
        but nobody waits for its result there.)"""
        rows: list[SessionRow] = []
        for session in list(source.sessions.values()):
            if session.busy:
                continue
            record = session.guest.record()
            child.sessions[session.session_id] = LiveSession(session.session_id, await copy.attach_session(record))
            rows.append(SessionRow(sandbox_id=child.row.sandbox_id, session_id=session.session_id,
                                   kind=session.guest.kind, record=record, opened_at=self.clock.wall()))
        self.store.add_sessions(rows)

    async def _reset(self, entry: Entry) -> ResetDone:
        async with entry.alone("reset"):
            check_start(entry.row.sandbox_id, Operation.RESET, entry.row.state, entry.row.reason)
            guest = self._guest(entry)
            started = self.clock.monotonic()
            if entry.sessions:
                self.store.drop_sessions(entry.row.sandbox_id, entry.sessions)
                entry.sessions.clear()
            entry.row, intent = self.store.move(entry.row, entry.row.state, intent="reset")
            try:
                report = await guest.reset()
                why = (report.detail or "the guest asked for it") if report.needs_full_reset else ""
            except SandboxError as e:
                why = f"reset inside the guest failed: {e.message}"
            if not why:
                self._result(entry, entry.row.state, intent, "ok: in_guest")
                self.metrics.operation("reset_in_guest", self.clock.monotonic() - started)
                return ResetDone(how="in_guest", row=entry.row, detail=report.detail)
            await self._replace(entry, guest, intent, why)
            self.metrics.operation("reset_replaced", self.clock.monotonic() - started)
            return ResetDone(how="replaced", row=entry.row, detail=why)

    async def _replace(self, entry: Entry, old: Guest, intent: int, why: str) -> None:
        """A new guest from the template under the same id; the old one is gone for good first."""
        backend = self.backend(entry.row.backend)
        generation = entry.row.generation + 1
        runtime_id = f"{entry.row.sandbox_id}-g{generation}"
        try:
            async with self.heavy.turn(entry.row.lease):
                self._check_wanted(entry)
                await old.kill()
                entry.guest = None
                entry.spare = [runtime_id]
                entry.guest = await backend.create(runtime_id, entry.row.template)
            self._result(entry, entry.row.state, intent, f"ok: replaced, {why}", event="replaced", runtime_id=runtime_id,
                         record=entry.guest.record(), generation=generation)
            entry.spare = []
        except BaseException as e:
            entry.doomed = entry.doomed or f"could not be replaced: {e}"
            await self._wipe_and_bury(entry, backend, intent, event="died")
            if isinstance(e, SandboxDiedError) or not isinstance(e, TidemillError):
                raise
            raise SandboxDiedError(f"sandbox {entry.row.sandbox_id} could not be reset: {why}; then {e.message}",
                                   remedy=e.remedy) from e

    async def _kill(self, entry: Entry) -> bool:
        async with entry.alone("kill"):
            if entry.row.state is S.DEAD:
                return False
            event = "died" if entry.doomed.startswith("found dead") else "killed"
            if (error := await self.carry_out_end(entry, event=event)) is not None:
                raise error
            return True

    async def carry_out_end(self, entry: Entry, *, event: str) -> TidemillError | None:
        """Kill the guest and bury the row, for `entry.doomed`. An error is returned; the entry then stays for the reaper.
        The caller holds the lock."""
        backend = self.backend(entry.row.backend)
        intent = 0
        try:
            entry.row, intent = self.store.move(entry.row, S.KILLING, intent="kill", detail={"reason": entry.doomed},
                                                reason=entry.doomed)
            async with self.kills.turn(entry.row.lease):
                await self._wipe(entry, backend)
            self._bury(entry, intent, outcome="ok", event=event)
        except TidemillError as e:
            log.error("cannot end %s (%s): %s", entry.row.sandbox_id, entry.doomed, e)
            if intent:
                self._note(intent, f"failed: {e}")
            self.metrics.failure("kill")
            return e
        return None

    def _guest(self, entry: Entry, capability: str = "") -> Guest:
        """The guest of a living sandbox whose backend has `capability` (pause, fork)."""
        self._check_wanted(entry)
        if capability and not getattr(self.backend(entry.row.backend).capabilities(), capability):
            raise MissingCapabilityError(f"backend {entry.row.backend} cannot {capability}.",
                                         remedy="GET /x/v1/capabilities says what each backend can do.")
        if entry.guest is None:
            raise SandboxDiedError(f"sandbox {entry.row.sandbox_id} has no guest.")
        return entry.guest


def _value_or_error(result: T | BaseException) -> T | TidemillError:
    if isinstance(result, BaseException) and not isinstance(result, TidemillError):
        raise result
    return result


def _row_or_error(result: SandboxRow | BaseException) -> SandboxRow | TidemillError:
    return _value_or_error(result)
