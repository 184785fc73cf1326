"""The store: rows in, rows out, one transaction per step.

The file is in WAL mode with `synchronous=NORMAL`. A crash of the service, even by SIGKILL, loses nothing,
because committed pages are already with the kernel. A power cut may lose the last transactions, but it ends
every sandbox they speak of as well, and WAL keeps the file consistent; so an fsync per step would buy nothing
and cost milliseconds. Writes therefore only copy pages into the kernel's cache (about 0.1 ms) and are made
directly on the event loop; the one step that does wait for the disk, the checkpoint, is `checkpoint()`, to be
run in a thread.

Not for concurrent writers: StateLock keeps the service alone.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from tidemill.core.clock import Clock, SystemClock
from tidemill.core.errors import NotFoundError, SandboxError
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.lifecycle import check_move
from tidemill.sandbox.store.records import EventRow, LeaseRow, OperationRow, SandboxRow, SessionRow
from tidemill.sandbox.store.schema import migrate

_COLUMNS = tuple(f.name for f in dataclasses.fields(SandboxRow))
_INSERT_SANDBOX = (f"INSERT INTO sandboxes ({', '.join(_COLUMNS)}) "
                   f"VALUES ({', '.join('?' for _ in _COLUMNS)})")
_CHANGEABLE = frozenset({"generation", "expires_at", "runtime_id", "record", "reason", "lease"})


class Store:
    """All rows of one state folder. Every method raises SandboxError if the disk refuses (full, read-only,
    damaged)."""

    def __init__(self, path: Path, *, clock: Clock | None = None) -> None:
        self.path = path
        self.daemon = 0
        self._clock = clock or SystemClock()
        with self._converted("open"):
            self._db = sqlite3.connect(path, isolation_level=None, timeout=10.0)
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            migrate(self._db, str(path))
            self._db.execute("PRAGMA wal_autocheckpoint = 0")
        path.chmod(0o600)

    def close(self) -> None:
        """Checkpoint and close; idempotent."""
        with self._converted("close"):
            self._db.close()

    def checkpoint(self) -> None:
        """Move the WAL into the main file, on a connection of its own. Waits for the disk: call it from a thread."""
        with self._converted("checkpoint"):
            side = sqlite3.connect(self.path, timeout=10.0)
            try:
                side.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            finally:
                side.close()

    # ---- the service itself

    def begin_daemon(self, pid: int, pid_start: int) -> int:
        """Record a new generation of the service and make it the author of all later rows."""
        with self._transaction():
            cursor = self._db.execute("INSERT INTO daemons (pid, pid_start, started_at) VALUES (?, ?, ?)",
                                      (pid, pid_start, self._clock.wall()))
        self.daemon = int(cursor.lastrowid or 0)
        return self.daemon

    def end_daemon(self) -> None:
        """Record that this generation stopped in order."""
        with self._transaction():
            self._db.execute("UPDATE daemons SET stopped_at = ? WHERE generation = ?",
                             (self._clock.wall(), self.daemon))

    # ---- sandboxes

    def insert(self, row: SandboxRow, *, kind: str, detail: Mapping[str, Any] | None = None) -> tuple[SandboxRow, int]:
        """Intent to bring a sandbox into being: its row in `creating` and an open operation. Returns row and
        operation id."""
        check_move(row.sandbox_id, None, row.state)
        row = dataclasses.replace(row, daemon=self.daemon, updated_at=self._clock.wall())
        with self._transaction():
            self._db.execute(_INSERT_SANDBOX, _encode(row))
            operation = self._open(row.sandbox_id, kind, detail)
        return row, operation

    def move(self, row: SandboxRow, to: SandboxState, *, intent: str = "", detail: Mapping[str, Any] | None = None,
             result_of: int = 0, outcome: str = "", event: str = "", **changes: Any) -> tuple[SandboxRow, int]:
        """One transaction: state `row.state -> to` (compare and set), other columns, an intent opened or
        closed, an event.

        intent     kind of an operation that starts with this move; its id is returned, else 0
        result_of  id of the operation that this move ends, with `outcome`. A move to `dead` ends all others too
        Raises SandboxError on an illegal move or if the stored state is not `row.state`.
        """
        if to is not row.state:
            check_move(row.sandbox_id, row.state, to)
        if unknown := set(changes) - _CHANGEABLE:
            raise SandboxError(f"columns {sorted(unknown)} cannot be changed")
        after = dataclasses.replace(row, state=to, daemon=self.daemon, updated_at=self._clock.wall(), **changes)
        operation = 0
        with self._transaction():
            values = dict(zip(_COLUMNS, _encode(after), strict=True))
            sets = ["state", "daemon", "updated_at", *changes]
            cursor = self._db.execute(
                f"UPDATE sandboxes SET {', '.join(f'{c} = ?' for c in sets)} WHERE sandbox_id = ? AND state = ?",
                (*(values[c] for c in sets), row.sandbox_id, row.state.value))
            if cursor.rowcount != 1:
                raise SandboxError(f"{row.sandbox_id}: the store does not have it in state {row.state.value}")
            if to is SandboxState.DEAD:
                self._db.execute("DELETE FROM sessions WHERE sandbox_id = ?", (row.sandbox_id,))
                self._db.execute("UPDATE operations SET finished_at = ?, outcome = 'cut short by the end' "
                                 "WHERE sandbox_id = ? AND finished_at IS NULL AND operation_id <> ?",
                                 (self._clock.wall(), row.sandbox_id, result_of))
            if intent:
                operation = self._open(row.sandbox_id, intent, detail)
            if result_of:
                self._finish(result_of, outcome)
            if event:
                self._event(after, event, after.reason)
        return after, operation

    def get(self, sandbox_id: str) -> SandboxRow:
        """Raises NotFoundError."""
        with self._converted("read"):
            found = self._db.execute("SELECT * FROM sandboxes WHERE sandbox_id = ?", (sandbox_id,)).fetchone()
        if found is None:
            raise NotFoundError(f"no sandbox {sandbox_id!r}.", remedy="`tidemill sandbox ls` shows what exists.")
        return _decode(found)

    def alive(self) -> list[SandboxRow]:
        """Every row that is not dead, oldest first."""
        with self._converted("read"):
            rows = self._db.execute("SELECT * FROM sandboxes WHERE state <> 'dead' ORDER BY created_at, sandbox_id")
            return [_decode(r) for r in rows]

    def forget_dead(self, older_than: float) -> int:
        """Delete history from before `older_than` (Unix seconds): dead sandboxes, finished operations, events."""
        with self._transaction():
            gone = self._db.execute("DELETE FROM sandboxes WHERE state = 'dead' AND updated_at < ?",
                                    (older_than,)).rowcount
            self._db.execute("DELETE FROM operations WHERE finished_at < ?", (older_than,))
            self._db.execute("DELETE FROM events WHERE at < ?", (older_than,))
        return gone

    # ---- operations and events

    def open_operations(self) -> list[OperationRow]:
        """Intents without a result, oldest first: what an interrupted service was doing."""
        with self._converted("read"):
            rows = self._db.execute("SELECT * FROM operations WHERE finished_at IS NULL ORDER BY operation_id")
            return [OperationRow(**(dict(r) | {"detail": json.loads(r["detail"])})) for r in rows]

    def finish(self, operation: int, outcome: str) -> None:
        """Result of an operation that moved no state."""
        with self._transaction():
            self._finish(operation, outcome)

    def events(self, after: int, limit: int) -> list[EventRow]:
        """Events with seq > `after`, in order."""
        with self._converted("read"):
            rows = self._db.execute("SELECT * FROM events WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit))
            return [EventRow(**dict(r)) for r in rows]

    # ---- sessions

    def add_sessions(self, rows: Iterable[SessionRow]) -> None:
        """Remember live sessions."""
        with self._transaction():
            self._db.executemany(
                "INSERT INTO sessions VALUES (?, ?, ?, ?, ?)",
                [(r.sandbox_id, r.session_id, r.kind, json.dumps(dict(r.record)), r.opened_at) for r in rows])

    def drop_sessions(self, sandbox_id: str, session_ids: Iterable[str]) -> None:
        """Forget sessions of one sandbox; unknown ids are ignored."""
        with self._transaction():
            self._db.executemany("DELETE FROM sessions WHERE sandbox_id = ? AND session_id = ?",
                                 [(sandbox_id, s) for s in session_ids])

    def sessions(self, sandbox_id: str) -> list[SessionRow]:
        """Sessions of one sandbox, oldest first."""
        with self._converted("read"):
            rows = self._db.execute("SELECT * FROM sessions WHERE sandbox_id = ? ORDER BY opened_at, session_id",
                                    (sandbox_id,))
            return [SessionRow(**(dict(r) | {"record": json.loads(r["record"])})) for r in rows]

    # ---- leases

    def put_lease(self, row: LeaseRow) -> None:
        """Insert or replace."""
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", dataclasses.astuple(row))

    def delete_lease(self, lease: str) -> None:
        """Forget a lease; idempotent. Its sandboxes are the caller's affair."""
        with self._transaction():
            self._db.execute("DELETE FROM leases WHERE lease = ?", (lease,))

    def leases(self) -> list[LeaseRow]:
        """All leases by name."""
        with self._converted("read"):
            return [LeaseRow(**dict(r)) for r in self._db.execute("SELECT * FROM leases ORDER BY lease")]

    # ---- inside a transaction

    def _open(self, sandbox_id: str, kind: str, detail: Mapping[str, Any] | None) -> int:
        cursor = self._db.execute(
            "INSERT INTO operations (sandbox_id, kind, daemon, started_at, detail) VALUES (?, ?, ?, ?, ?)",
            (sandbox_id, kind, self.daemon, self._clock.wall(), json.dumps(dict(detail or {}))))
        return int(cursor.lastrowid or 0)

    def _finish(self, operation: int, outcome: str) -> None:
        self._db.execute("UPDATE operations SET finished_at = ?, outcome = ? WHERE operation_id = ?",
                         (self._clock.wall(), outcome, operation))

    def _event(self, row: SandboxRow, kind: str, detail: str) -> None:
        self._db.execute("INSERT INTO events (at, sandbox_id, lease, kind, detail) VALUES (?, ?, ?, ?, ?)",
                         (self._clock.wall(), row.sandbox_id, row.lease, kind, detail))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._converted("write"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _converted(self, what: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as e:
            raise SandboxError(f"cannot {what} {self.path}: {e}",
                               remedy="Check free space and permissions of the state folder.") from e


def _encode(row: SandboxRow) -> tuple[Any, ...]:
    values = {name: getattr(row, name) for name in _COLUMNS}
    values["state"] = row.state.value
    values["metadata"] = json.dumps(dict(row.metadata))
    values["record"] = None if row.record is None else json.dumps(dict(row.record))
    return tuple(values[name] for name in _COLUMNS)


def _decode(found: sqlite3.Row) -> SandboxRow:
    values = cast("dict[str, Any]", dict(found))
    values["state"] = SandboxState(values["state"])
    values["metadata"] = json.loads(values["metadata"])
    values["record"] = None if values["record"] is None else json.loads(values["record"])
    return SandboxRow(**values)
