"""Using a sandbox: commands, live sessions, files. The hot path: no row is written for a command or a run.

A call that meets a dead guest starts its clean-up. A session whose run passed its deadline, was cancelled or
broke is gone, as its process is. Results pass through as values; a non-zero exit, a deadline and cut output
are not errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager

from tidemill.core.errors import BusyError, NotFoundError, SandboxDiedError, TidemillError
from tidemill.core.ids import new_id
from tidemill.core.sandbox_api import ExecResult
from tidemill.sandbox.backends.base import Guest
from tidemill.sandbox.entry import Entry, LiveSession
from tidemill.sandbox.orchestrator import Orchestrator
from tidemill.sandbox.store.records import SessionRow

MAX_SESSIONS = 64
"""Live sessions per sandbox."""


class Usage:
    """Calls into running sandboxes of one orchestrator."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    async def exec(self, sandbox_id: str, argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], cwd: str,
                   user: str, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """One command, as tidemill.core.sandbox_api.Sandbox.exec."""
        async with self._guest(sandbox_id, "exec") as guest:
            return await guest.exec(argv, stdin=stdin, env=env, cwd=cwd, user=user, timeout_s=timeout_s,
                                    max_output_bytes=max_output_bytes)

    async def write_file(self, sandbox_id: str, path: str, data: bytes, *, mode: int) -> None:
        async with self._guest(sandbox_id, "write_file") as guest:
            await guest.write_file(path, data, mode=mode)

    async def read_file(self, sandbox_id: str, path: str, *, max_bytes: int) -> bytes:
        async with self._guest(sandbox_id, "read_file") as guest:
            return await guest.read_file(path, max_bytes=max_bytes)

    async def open_session(self, sandbox_id: str, kind: str) -> str:
        """Start a live session and return its id, valid until it, its sandbox or a reset ends it."""
        orchestrator = self._orchestrator
        entry = orchestrator.entry(sandbox_id)
        if len(entry.sessions) >= MAX_SESSIONS:
            raise BusyError(f"{sandbox_id} has {len(entry.sessions)} live sessions, the limit.", remedy="Close some.")
        async with self._guest(sandbox_id, "open_session") as guest:
            session = await guest.open_session(kind)
        if entry.guest is not guest:
            raise SandboxDiedError(f"sandbox {sandbox_id} was replaced or ended while the session was opened.")
        session_id = new_id("ses")
        try:
            orchestrator.store.add_sessions([SessionRow(
                sandbox_id=sandbox_id, session_id=session_id, kind=session.kind, record=session.record(),
                opened_at=orchestrator.clock.wall())])
        except TidemillError:
            await session.close()
            raise
        entry.sessions[session_id] = LiveSession(session_id, session)
        return session_id

    def sessions(self, sandbox_id: str) -> list[tuple[str, str]]:
        """(id, kind) of live sessions."""
        return [(s.session_id, s.guest.kind) for s in self._orchestrator.entry(sandbox_id).sessions.values()]

    async def run(self, sandbox_id: str, session_id: str, code: str, *, timeout_s: float,
                  max_output_bytes: int) -> ExecResult:
        """Run in a session. Raises NotFoundError if it is gone, BusyError if a run is in progress."""
        entry = self._orchestrator.entry(sandbox_id)
        async with self._guest(sandbox_id, "run"):
            session = entry.sessions.get(session_id)
            if session is None:
                raise NotFoundError(f"{sandbox_id} has no session {session_id!r}: it was never opened, or a deadline, "
                                    "a reset or an error ended it.", remedy="Open a new one.")
            if session.busy:
                raise BusyError(f"session {session_id} is running something else.")
            session.busy = True
            try:
                result = await session.guest.run(code, timeout_s=timeout_s, max_output_bytes=max_output_bytes)
            except SandboxDiedError:
                raise
            except (TidemillError, asyncio.CancelledError):
                self._orchestrator.spawn(self._drop(entry, session))
                raise
            finally:
                session.busy = False
            if result.timed_out or result.exit_code is None:
                await self._drop(entry, session)
            return result

    async def close_session(self, sandbox_id: str, session_id: str) -> bool:
        """End a session; False if it was gone."""
        entry = self._orchestrator.entry(sandbox_id)
        session = entry.sessions.get(session_id)
        if session is None:
            return False
        async with self._guest(sandbox_id, "close_session"):
            await self._drop(entry, session)
        return True

    async def _drop(self, entry: Entry, session: LiveSession) -> None:
        if entry.sessions.pop(session.session_id, None) is not None:
            try:
                await session.guest.close()
            finally:
                self._orchestrator.store.drop_sessions(entry.row.sandbox_id, [session.session_id])

    @asynccontextmanager
    async def _guest(self, sandbox_id: str, call: str) -> AsyncIterator[Guest]:
        orchestrator = self._orchestrator
        entry = orchestrator.entry(sandbox_id)
        guest = await entry.usable()
        started = orchestrator.clock.monotonic()
        try:
            yield guest
        except SandboxDiedError as e:
            # Only the guest that is current speaks for the sandbox: a reset may have replaced it meanwhile.
            if entry.guest is guest and entry.gate.is_set():
                orchestrator.endings.found_dead(entry, e)
            raise
        orchestrator.metrics.call(call, orchestrator.clock.monotonic() - started)
