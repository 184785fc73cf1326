"""How sandboxes end: by wish, by time, found dead, or because a start or a reset failed."""

from __future__ import annotations

import logging

from tidemill.core.errors import TidemillError
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.backends.base import Backend
from tidemill.sandbox.entry import Entry
from tidemill.sandbox.roster import Roster

log = logging.getLogger(__name__)
S = SandboxState


class Endings:
    """Ends sandboxes of one roster. `Entry.doomed` says why; whatever resists stays for the reaper."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    async def kill(self, entry: Entry) -> bool:
        async with entry.alone("kill"):
            if entry.row.state is S.DEAD:
                return False
            event = "died" if entry.doomed.startswith("found dead") else "killed"
            if (error := await self.carry_out_end(entry, event=event)) is not None:
                raise error
            return True

    async def carry_out_end(self, entry: Entry, *, event: str) -> TidemillError | None:
        """Kill the guest and bury the row, for `entry.doomed`. An error is returned; the entry then stays for
        the reaper. The caller holds the lock."""
        backend = self._roster.backend(entry.row.backend)
        intent = 0
        try:
            entry.row, intent = self._roster.store.move(
                entry.row, S.KILLING, intent="kill", detail={"reason": entry.doomed}, reason=entry.doomed)
            async with self._roster.kills.turn(entry.row.lease):
                await self._wipe(entry, backend)
            self._bury(entry, intent, outcome="ok", event=event)
        except TidemillError as e:
            log.error("cannot end %s (%s): %s", entry.row.sandbox_id, entry.doomed, e)
            if intent:
                self._roster.note(intent, f"failed: {e}")
            self._roster.metrics.failure("kill")
            return e
        return None

    def found_dead(self, entry: Entry, error: TidemillError) -> None:
        """A call met SandboxDiedError: clean up behind it, in the background."""
        if entry.row.state is not S.DEAD and not entry.doomed:
            entry.doomed = f"found dead: {error.message}"
            self._roster.spawn(self.kill(entry))

    async def wipe_and_bury(self, entry: Entry, backend: Backend, operation: int, *, event: str) -> None:
        """Remove whatever exists, then the row, for `entry.doomed`. If either fails, the entry stays as it is
        and the reaper tries again."""
        try:
            await self._wipe(entry, backend)
            self._bury(entry, operation, outcome=f"failed: {entry.doomed}", event=event)
        except TidemillError as e:
            log.error("cannot remove %s: %s", entry.row.sandbox_id, e)
            self._roster.metrics.failure("wipe")

    async def _wipe(self, entry: Entry, backend: Backend) -> None:
        """Nothing of the sandbox is left on the machine afterwards. A living guest knows best how to end itself."""
        if entry.guest is not None:
            await entry.guest.kill()
        else:
            await backend.destroy(entry.row.runtime_id)
        for runtime_id in entry.spare:
            await backend.destroy(runtime_id)

    def _bury(self, entry: Entry, operation: int, *, outcome: str, event: str) -> None:
        entry.row, _ = self._roster.store.move(
            entry.row, S.DEAD, reason=entry.doomed, result_of=operation, outcome=outcome, event=event)
        entry.guest = None
        entry.sessions.clear()
        self._roster.entries.pop(entry.row.sandbox_id, None)
