"""Leases: groups of sandboxes that end with their owner.

An owner is a process, known by pid and start time so that a later process with the same pid is never taken
for it, or a caller that sends heartbeats, or both. When the owner is gone the lease is marked lost; after a
grace period, in which a new process may take it over under the same name, its sandboxes are reaped by the
service. Decides; kills nothing itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from tidemill.core.clock import Clock
from tidemill.core.errors import InputError, NotFoundError
from tidemill.core.launcher import start_time
from tidemill.sandbox.store import LeaseRow, Store


@dataclass(frozen=True, slots=True)
class Joined:
    """Answer to registering: the lease, and whether it was new, taken over from an owner that is gone, or shared."""

    row: LeaseRow
    how: str
    """`created`, `renewed`, `taken_over` or `shared`."""


class Leases:
    """All leases of one service; a cache over the store's rows."""

    def __init__(self, store: Store, clock: Clock, *, grace_s: float,
                 process_start: Callable[[int], int | None] = start_time) -> None:
        self.grace_s = grace_s
        self._store = store
        self._clock = clock
        self._process_start = process_start
        self._rows = {row.lease: row for row in store.leases()}

    def __contains__(self, lease: str) -> bool:
        return lease in self._rows

    def rows(self) -> list[LeaseRow]:
        """All leases by name."""
        return [self._rows[name] for name in sorted(self._rows)]

    def check(self, lease: str) -> None:
        """Raise NotFoundError unless `lease` is registered (the empty lease always is)."""
        if lease and lease not in self._rows:
            raise NotFoundError(f"no lease {lease!r}.", remedy="Register it first with POST /x/v1/leases.")

    def join(self, lease: str, *, owner_pid: int | None, owner_start: int | None, ttl_s: float | None) -> Joined:
        """Register `lease`, or take it over from an owner that is gone, or share it with one that lives.

        Raises InputError if the owner does not run or nothing would ever end the lease.
        """
        if owner_pid is None and ttl_s is None:
            raise InputError("a lease needs ownerPid, ttl or both: otherwise nothing would ever end it.",
                             field="ownerPid")
        if owner_pid is not None:
            actual = self._process_start(owner_pid)
            if actual is None or owner_start not in (None, actual):
                raise InputError(f"ownerPid = {owner_pid}: no such process with that start time.", field="ownerPid")
            owner_start = actual
        now = self._clock.wall()
        old = self._rows.get(lease)
        row = LeaseRow(lease=lease, owner_pid=owner_pid, owner_start=owner_start, ttl_s=ttl_s,
                       created_at=old.created_at if old else now, heartbeat_at=now)
        if old is None:
            how = "created"
        elif (old.owner_pid, old.owner_start) == (owner_pid, owner_start):
            how = "renewed"
        elif self.lost(old):
            how = "taken_over"
        else:
            return Joined(old, "shared")
        self._put(row)
        return Joined(row, how)

    def heartbeat(self, lease: str) -> LeaseRow:
        """Renew; raises NotFoundError."""
        self.check(lease)
        if lease == "":
            raise NotFoundError("no lease ''.")
        row = dataclasses.replace(self._rows[lease], heartbeat_at=self._clock.wall(), lost_at=None)
        self._put(row)
        return row

    def forget(self, lease: str) -> None:
        """Delete the lease; idempotent."""
        if self._rows.pop(lease, None) is not None:
            self._store.delete_lease(lease)

    def lost(self, row: LeaseRow) -> bool:
        """Whether its owner is gone or its heartbeats have stopped."""
        if row.owner_pid is not None and self._process_start(row.owner_pid) != row.owner_start:
            return True
        return row.ttl_s is not None and self._clock.wall() > row.heartbeat_at + row.ttl_s

    def expired(self) -> list[LeaseRow]:
        """Mark leases newly lost, unmark those found again, and return those lost for longer than the grace
        period."""
        now = self._clock.wall()
        due: list[LeaseRow] = []
        for row in self.rows():
            if not self.lost(row):
                if row.lost_at is not None:
                    self._put(dataclasses.replace(row, lost_at=None))
            elif row.lost_at is None:
                self._put(dataclasses.replace(row, lost_at=now))
            elif now >= row.lost_at + self.grace_s:
                due.append(row)
        return due

    def _put(self, row: LeaseRow) -> None:
        self._store.put_lease(row)
        self._rows[row.lease] = row
