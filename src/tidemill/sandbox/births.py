"""How sandboxes begin: from a template, or as copies of a running one."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from tidemill.core.errors import BusyError, NotFoundError, SandboxDiedError, SandboxError, TidemillError
from tidemill.core.ids import new_id
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.backends.base import Backend, Guest
from tidemill.sandbox.endings import Endings
from tidemill.sandbox.entry import Entry, LiveSession
from tidemill.sandbox.lifecycle import Operation, check_start
from tidemill.sandbox.roster import Roster
from tidemill.sandbox.store import SandboxRow
from tidemill.sandbox.store.records import SessionRow

S = SandboxState


@dataclass(frozen=True, slots=True, kw_only=True)
class CreateSpec:
    """What to create. `timeout_s` counts from the moment it runs."""

    template: str = "base"
    backend: str = ""
    lease: str = ""
    timeout_s: float = 300.0
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])


class Births:
    """Operations on one roster."""

    def __init__(self, roster: Roster, endings: Endings) -> None:
        self._roster = roster
        self._endings = endings

    async def check_spec(self, spec: CreateSpec) -> None:
        self._roster.leases.check(spec.lease)
        aside = self._roster.unavailable.get(spec.backend or self._roster.config.backend)
        if aside is not None:
            await self._roster.add_backend(aside[0])
        backend = self._roster.backend(spec.backend)
        names = await backend.templates()
        if spec.template not in names:
            raise NotFoundError(f"no template {spec.template!r} for backend {backend.name}; it has: "
                                f"{', '.join(names) or 'none'}.",
                                remedy="`tidemill sandbox setup` makes the template `base`.")

    def admit(self, spec: CreateSpec, count: int) -> list[Entry]:
        """Room for `count` more? Then one row and entry each, in `creating` (no guest yet)."""
        if self._roster.stopping:
            raise BusyError("the sandbox service is stopping.")
        self._roster.check_room(count)
        entries: list[Entry] = []
        try:
            entries.extend(self._admit_one(spec) for _ in range(count))
        except SandboxError as e:
            for entry in entries:
                entry.doomed = f"its batch could not be recorded: {e.message}"  # the reaper ends it
            raise
        return entries

    def _admit_one(self, spec: CreateSpec, *, parent: SandboxRow | None = None,
                   kind: Operation = Operation.CREATE) -> Entry:
        now = self._roster.clock.wall()
        sandbox_id = new_id("sbx", now_ms=int(now * 1000))
        row = SandboxRow(
            sandbox_id=sandbox_id, template=spec.template, backend=self._roster.backend(spec.backend).name,
            state=S.CREATING, lease=spec.lease, parent_id=parent.sandbox_id if parent else "", generation=0,
            created_at=now, expires_at=now + spec.timeout_s, metadata=spec.metadata, runtime_id=sandbox_id,
        )
        row, operation = self._roster.store.insert(row, kind=kind.value)
        entry = Entry(row, operation=operation)
        self._roster.entries[sandbox_id] = entry
        return entry

    async def create(self, entry: Entry, spec: CreateSpec) -> SandboxRow:
        backend = self._roster.backend(spec.backend)
        async with entry.alone("create"):
            started = self._roster.clock.monotonic()
            try:
                async with self._roster.heavy.turn(spec.lease):
                    self._roster.check_wanted(entry)
                    if self._roster.stopping:
                        raise BusyError("the sandbox service is stopping.")
                    guest = await backend.create(entry.row.runtime_id, spec.template)
                self._born(entry, guest, spec.timeout_s, event="created")
            except BaseException as e:
                await self._stillborn(entry, backend, e)
                raise
            self._roster.metrics.operation("create", self._roster.clock.monotonic() - started)
            return entry.row

    def _born(self, entry: Entry, guest: Guest, timeout_s: float, *, event: str) -> None:
        entry.guest = guest
        entry.row, _ = self._roster.store.move(
            entry.row, S.RUNNING, record=guest.record(), expires_at=self._roster.clock.wall() + timeout_s,
            result_of=entry.operation, outcome="ok", event=event)

    async def _stillborn(self, entry: Entry, backend: Backend, error: BaseException) -> None:
        """Undo a start that failed."""
        reason = f"could not start: {error}" if isinstance(error, TidemillError) else "could not start"
        entry.doomed = entry.doomed or reason
        await self._endings.wipe_and_bury(entry, backend, entry.operation, event="create_failed")

    async def fork(self, entry: Entry, count: int, timeout_s: float | None) -> list[SandboxRow | TidemillError]:
        async with entry.alone("fork"), AsyncExitStack() as held:
            source = entry.row
            check_start(source.sandbox_id, Operation.FORK, source.state, source.reason)
            guest, backend = self._roster.guest(entry, "fork"), self._roster.backend(source.backend)
            started = self._roster.clock.monotonic()
            self._roster.check_room(count)
            left_s = source.expires_at - self._roster.clock.wall() if timeout_s is None else timeout_s
            spec = CreateSpec(template=source.template, backend=source.backend, lease=source.lease,
                              timeout_s=max(left_s, 1.0), metadata=source.metadata)
            _, intent = self._roster.store.move(source, source.state, intent="fork", detail={"count": count})
            children: list[Entry] = []
            try:
                for _ in range(count):
                    children.append(self._admit_one(spec, parent=source, kind=Operation.FORK))
                    await held.enter_async_context(children[-1].alone("fork"))
                async with self._roster.heavy.turn(source.lease):
                    self._roster.check_wanted(entry)
                    copies = await guest.fork([c.row.runtime_id for c in children])
            except BaseException as e:
                for child in children:
                    await self._stillborn(child, backend, e)
                self._roster.note(intent, f"failed: {e}")
                if isinstance(e, SandboxDiedError):
                    self._endings.found_dead(entry, e)
                raise
            results = [await self._adopt_copy(entry, child, copy, backend, spec)
                       for child, copy in zip(children, copies, strict=True)]
            bad = sum(isinstance(r, TidemillError) for r in results)
            self._roster.note(intent, f"{count - bad} of {count}")
            self._roster.metrics.operation("fork", self._roster.clock.monotonic() - started)
            return results

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
        """The copy has its source's idle sessions, under the same ids. (In a busy one, the cell that ran goes
        on in the copy, but nobody waits for its result there.)"""
        rows: list[SessionRow] = []
        for session in list(source.sessions.values()):
            if session.busy:
                continue
            record = session.guest.record()
            child.sessions[session.session_id] = LiveSession(session.session_id, await copy.attach_session(record))
            rows.append(SessionRow(sandbox_id=child.row.sandbox_id, session_id=session.session_id,
                                   kind=session.guest.kind, record=record, opened_at=self._roster.clock.wall()))
        self._roster.store.add_sessions(rows)
