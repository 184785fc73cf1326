"""One living sandbox in the memory of the service: its row, its guest, its sessions, and who may touch it
when.

`lock` serialises operations on its life. `gate` is open while commands may start; an operation that changes
what runs inside closes it. Commands already running are not waited for: a pause freezes them, a reset or kill
ends them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from tidemill.core.errors import BusyError, SandboxDiedError
from tidemill.sandbox.backends.base import Guest, GuestSession
from tidemill.sandbox.lifecycle import check_usable
from tidemill.sandbox.store import SandboxRow
from tidemill.sandbox.store.records import SessionRow

WAIT_S = 60.0
"""How long a call waits for the operation before it."""


@dataclass(slots=True)
class LiveSession:
    """A session and whether a call runs in it."""

    session_id: str
    guest: GuestSession
    busy: bool = False


@dataclass(slots=True)
class Entry:
    """See the module.

    operation  id of the intent that brought it into being
    spare      runtime names beside the row's under which something of it may exist (a replacement that failed)
    waiting    sessions of a paused guest adopted at start, to be attached when it resumes
    doomed     the reason for an end that has been decided but not yet carried out
    """

    row: SandboxRow
    guest: Guest | None = None
    operation: int = 0
    sessions: dict[str, LiveSession] = field(default_factory=dict[str, LiveSession])
    waiting: list[SessionRow] = field(default_factory=list[SessionRow])
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    doomed: str = ""
    spare: list[str] = field(default_factory=list[str])

    @asynccontextmanager
    async def alone(self, what: str) -> AsyncIterator[None]:
        """Hold the lock with the gate closed. Raises BusyError if the operation before it takes too long."""
        try:
            async with asyncio.timeout(WAIT_S):
                await self.lock.acquire()
        except TimeoutError as e:
            raise BusyError(f"{self.row.sandbox_id}: {what} waited {WAIT_S:g} s for another operation to end.") from e
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()
            self.lock.release()

    async def usable(self) -> Guest:
        """The guest, once no operation is in the way. Raises BusyError (paused, or waited too long),
        SandboxDiedError."""
        if not self.gate.is_set():
            try:
                async with asyncio.timeout(WAIT_S):
                    await self.gate.wait()
            except TimeoutError as e:
                raise BusyError(f"{self.row.sandbox_id} has been {self.row.state.value} for {WAIT_S:g} s.") from e
        if self.doomed:
            raise SandboxDiedError(f"sandbox {self.row.sandbox_id} is ending ({self.doomed}).")
        check_usable(self.row.sandbox_id, self.row.state, self.row.reason)
        if self.guest is None:
            raise SandboxDiedError(f"sandbox {self.row.sandbox_id} has no guest.")
        return self.guest
