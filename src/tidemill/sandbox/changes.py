"""What changes in a sandbox's life between its start and its end: pause, resume, reset."""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.errors import NotFoundError, SandboxDiedError, SandboxError, TidemillError
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.backends.base import Guest
from tidemill.sandbox.endings import Endings
from tidemill.sandbox.entry import Entry, LiveSession
from tidemill.sandbox.lifecycle import Operation, check_start
from tidemill.sandbox.roster import Roster
from tidemill.sandbox.store import SandboxRow

S = SandboxState


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetDone:
    """How a reset was done: `in_guest`, or `replaced` by a new guest under the same id (generation + 1), and why."""

    how: str
    row: SandboxRow
    detail: str = ""


class Changes:
    """Operations on one roster."""

    def __init__(self, roster: Roster, endings: Endings) -> None:
        self._roster = roster
        self._endings = endings

    async def freeze(self, entry: Entry, operation: Operation) -> SandboxRow:
        async with entry.alone(operation.value):
            moves = check_start(entry.row.sandbox_id, operation, entry.row.state, entry.row.reason)
            guest = self._roster.guest(entry, "pause")
            entry.row, intent = self._roster.store.move(entry.row, moves.during, intent=operation.value)
            try:
                await (guest.pause() if operation is Operation.PAUSE else guest.resume())
            except SandboxDiedError as e:
                self._endings.found_dead(entry, e)
                raise
            except TidemillError as e:
                self._roster.result(entry, moves.undone, intent, f"failed: {e}")
                raise
            self._roster.result(entry, moves.done, intent, "ok", event=moves.done.value)
            await self.attach_sessions(entry, guest)
            return entry.row

    async def attach_sessions(self, entry: Entry, guest: Guest) -> None:
        """Find the sessions in `entry.waiting` again; those that have ended meanwhile are forgotten."""
        if entry.row.state is not S.RUNNING:
            return
        while entry.waiting:
            row = entry.waiting.pop(0)
            try:
                session = await guest.attach_session(row.record)
            except NotFoundError:
                self._roster.store.drop_sessions(row.sandbox_id, [row.session_id])
            else:
                entry.sessions[row.session_id] = LiveSession(row.session_id, session)

    async def reset(self, entry: Entry) -> ResetDone:
        async with entry.alone("reset"):
            check_start(entry.row.sandbox_id, Operation.RESET, entry.row.state, entry.row.reason)
            guest = self._roster.guest(entry)
            started = self._roster.clock.monotonic()
            if entry.sessions:
                self._roster.store.drop_sessions(entry.row.sandbox_id, entry.sessions)
                entry.sessions.clear()
            entry.row, intent = self._roster.store.move(entry.row, entry.row.state, intent="reset")
            try:
                report = await guest.reset()
                detail = report.detail
                why = (detail or "the guest asked for it") if report.needs_full_reset else ""
            except SandboxError as e:
                detail = why = f"reset inside the guest failed: {e.message}"
            if not why:
                self._roster.result(entry, entry.row.state, intent, "ok: in_guest")
                self._roster.metrics.operation("reset_in_guest", self._roster.clock.monotonic() - started)
                return ResetDone(how="in_guest", row=entry.row, detail=detail)
            await self._replace(entry, guest, intent, why)
            self._roster.metrics.operation("reset_replaced", self._roster.clock.monotonic() - started)
            return ResetDone(how="replaced", row=entry.row, detail=why)

    async def _replace(self, entry: Entry, old: Guest, intent: int, why: str) -> None:
        """A new guest from the template under the same id; the old one is gone for good first."""
        backend = self._roster.backend(entry.row.backend)
        generation = entry.row.generation + 1
        runtime_id = f"{entry.row.sandbox_id}-g{generation}"
        try:
            async with self._roster.heavy.turn(entry.row.lease):
                self._roster.check_wanted(entry)
                await old.kill()
                entry.guest = None
                entry.spare = [runtime_id]
                entry.guest = await backend.create(runtime_id, entry.row.template)
            self._roster.result(entry, entry.row.state, intent, f"ok: replaced, {why}", event="replaced",
                                runtime_id=runtime_id, record=entry.guest.record(), generation=generation)
            entry.spare = []
        except BaseException as e:
            entry.doomed = entry.doomed or f"could not be replaced: {e}"
            await self._endings.wipe_and_bury(entry, backend, intent, event="died")
            if isinstance(e, SandboxDiedError) or not isinstance(e, TidemillError):
                raise
            raise SandboxDiedError(f"sandbox {entry.row.sandbox_id} could not be reset: {why}; then {e.message}",
                                   remedy=e.remedy) from e
