"""What a new service does before it listens: find every sandbox the store says exists, and remove what it
does not.

    row says            what is done                                                        afterwards
    creating            the start was interrupted: whatever exists is removed                dead
    killing             the end was interrupted: it is carried out                           dead
    running, resuming   attached and asked for a sign of life; continued if found frozen     running, else dead
    paused              attached; frozen again if found running                              paused, else dead
    pausing             attached; as it is found                                             as found, else dead
An interrupted reset is done again. An interrupted fork is undone by its children's rows. Then each backend
removes every guest of this state folder that no living row names; guests of other folders are never touched.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from tidemill.core.errors import TidemillError
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.backends.base import Backend, Guest
from tidemill.sandbox.entry import Entry
from tidemill.sandbox.orchestrator import Orchestrator
from tidemill.sandbox.store import OperationRow, SandboxRow

log = logging.getLogger(__name__)
S = SandboxState


@dataclass(slots=True)
class RecoveryReport:
    """Ids by what happened to them. `unreachable`: their backend is not part of this service; rows are left
    as they are."""

    adopted: list[str] = field(default_factory=list[str])
    dead: list[str] = field(default_factory=list[str])
    undone: list[str] = field(default_factory=list[str])
    orphans: list[str] = field(default_factory=list[str])
    unreachable: list[str] = field(default_factory=list[str])

    def __str__(self) -> str:
        return ", ".join(f"{name} {len(getattr(self, name))}"
                         for name in ("adopted", "dead", "undone", "orphans", "unreachable"))


async def recover(orchestrator: Orchestrator) -> RecoveryReport:
    """Bring memory, store and machine to agree. Raises nothing about single sandboxes; they are in the report."""
    report = RecoveryReport()
    store = orchestrator.store
    interrupted = store.open_operations()
    limit = asyncio.Semaphore(2 * orchestrator.config.workers)

    async def one(row: SandboxRow) -> None:
        async with limit:
            await _recover_one(orchestrator, row, report)

    rows = store.alive()
    await asyncio.gather(*(one(row) for row in rows))
    for operation in interrupted:
        store.finish(operation.operation_id, "interrupted")
    await _remove_orphans(orchestrator, rows, report)
    await _repeat_resets(orchestrator, interrupted)
    log.info("recovery: %s", report)
    return report


async def _recover_one(orchestrator: Orchestrator, row: SandboxRow, report: RecoveryReport) -> None:
    backend = orchestrator.backends.get(row.backend)
    if backend is None:
        log.error("%s belongs to backend %s, which this service does not have: left alone", row.sandbox_id, row.backend)
        report.unreachable.append(row.sandbox_id)
        return
    entry = Entry(row)
    entry.gate.set()
    orchestrator.entries[row.sandbox_id] = entry
    if row.state in (S.CREATING, S.KILLING) or row.record is None:
        entry.doomed = row.reason or f"the service ended while it was {row.state.value}"
        report.undone.append(row.sandbox_id)
        orchestrator.metrics.adopted("undone")
        await orchestrator.endings.carry_out_end(entry, event="undone")
        return
    try:
        guest = await backend.attach(row.record)
        entry.guest = guest
        await guest.hello()
        await _settle_state(orchestrator, entry, guest)
    except TidemillError as e:
        log.warning("%s did not survive: %s", row.sandbox_id, e)
        entry.doomed = f"not alive when the service started: {e.message}"
        report.dead.append(row.sandbox_id)
        orchestrator.metrics.adopted("dead")
        await orchestrator.endings.carry_out_end(entry, event="died")
        return
    report.adopted.append(row.sandbox_id)
    orchestrator.metrics.adopted("alive")


async def _settle_state(orchestrator: Orchestrator, entry: Entry, guest: Guest) -> None:
    row = entry.row
    if row.state in (S.RUNNING, S.RESUMING) and guest.paused:
        await guest.resume()
    elif row.state is S.PAUSED and not guest.paused:
        await guest.pause()
    state = S.PAUSED if guest.paused else S.RUNNING
    entry.row, _ = orchestrator.store.move(row, state, event="adopted")
    entry.waiting = orchestrator.store.sessions(row.sandbox_id)
    await orchestrator.changes.attach_sessions(entry, guest)


async def _remove_orphans(orchestrator: Orchestrator, rows: list[SandboxRow], report: RecoveryReport) -> None:
    keep = {row.runtime_id for row in rows if row.sandbox_id in report.unreachable}
    keep |= {entry.row.runtime_id for entry in orchestrator.entries.values()}

    async def reap(backend: Backend) -> None:
        try:
            gone = await backend.reap(keep)
        except TidemillError as e:
            log.error("backend %s could not remove orphans: %s", backend.name, e)
            orchestrator.metrics.failure("reap")
            return
        for runtime_id in gone:
            log.warning("removed %s %s, which no sandbox of this state folder owned", backend.name, runtime_id)
        report.orphans.extend(gone)

    await asyncio.gather(*(reap(b) for b in orchestrator.backends.values()))


async def _repeat_resets(orchestrator: Orchestrator, interrupted: list[OperationRow]) -> None:
    for operation in interrupted:
        entry = orchestrator.entries.get(operation.sandbox_id)
        if operation.kind != "reset" or entry is None or entry.doomed or entry.row.state is not S.RUNNING:
            continue
        try:
            await orchestrator.reset(operation.sandbox_id)
        except TidemillError as e:
            log.warning("%s was being reset when the service ended and could not be reset again: %s",
                        operation.sandbox_id, e)
