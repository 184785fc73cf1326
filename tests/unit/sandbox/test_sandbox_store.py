"""The store: steps are transactions, a killed writer loses nothing it committed, the file has one owner."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from tidemill.core.clock import ManualClock
from tidemill.core.errors import BusyError, IntegrityError, NotFoundError, SandboxError
from tidemill.core.sandbox_api import SandboxState as S
from tidemill.sandbox.store import LeaseRow, SandboxRow, StateLock, Store
from tidemill.sandbox.store.lock import lock_holder
from tidemill.sandbox.store.records import SessionRow


def row(sandbox_id: str = "sbx-1", **changes: object) -> SandboxRow:
    values = {"sandbox_id": sandbox_id, "template": "base", "backend": "fake", "state": S.CREATING, "lease": "run",
              "parent_id": "", "generation": 0, "created_at": 10.0, "expires_at": 20.0, "metadata": {"a": "ü"},
              "runtime_id": "rt-1"} | changes
    return SandboxRow(**values)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path):
    store = Store(tmp_path / "store.sqlite", clock=ManualClock())
    store.begin_daemon(os.getpid(), 1)
    yield store
    store.close()


def test_a_life_step_by_step(store: Store) -> None:
    created, operation = store.insert(row(), kind="create")
    assert [(o.operation_id, o.kind) for o in store.open_operations()] == [(operation, "create")]
    assert store.get("sbx-1") == created
    running, none = store.move(created, S.RUNNING, record={"pid": 5}, result_of=operation, outcome="ok",
                               event="created")
    assert none == 0
    assert store.open_operations() == []
    pausing, pause = store.move(running, S.PAUSING, intent="pause")
    assert [o.kind for o in store.open_operations()] == ["pause"]
    paused, _ = store.move(pausing, S.PAUSED, result_of=pause, outcome="ok", event="paused")
    assert store.alive() == [paused]
    dead, _ = store.move(paused, S.DEAD, reason="found dead", event="died")
    assert store.alive() == []
    assert store.get("sbx-1") == dead
    assert dead.record == {"pid": 5}
    assert [(e.kind, e.detail) for e in store.events(0, 10)] == [
        ("created", ""), ("paused", ""), ("died", "found dead")]
    assert [e.kind for e in store.events(1, 1)] == ["paused"]


def test_an_illegal_move_or_a_stale_row_changes_nothing(store: Store) -> None:
    created, _ = store.insert(row(), kind="create")
    with pytest.raises(SandboxError, match="illegal move"):
        store.move(created, S.PAUSED)
    running, _ = store.move(created, S.RUNNING)
    with pytest.raises(SandboxError, match="does not have it in state creating"):
        store.move(created, S.DEAD, intent="kill", event="died")
    assert store.get("sbx-1") == running
    assert len(store.open_operations()) == 1
    assert store.events(0, 10) == []
    with pytest.raises(SandboxError, match="cannot be changed"):
        store.move(running, S.RUNNING, template="other")


def test_unknown_and_repeated_ids(store: Store) -> None:
    with pytest.raises(NotFoundError, match="sbx-9"):
        store.get("sbx-9")
    store.insert(row(), kind="create")
    with pytest.raises(SandboxError, match="UNIQUE"):
        store.insert(row(), kind="create")
    assert len(store.open_operations()) == 1


def test_sessions_end_with_their_sandbox(store: Store) -> None:
    created, _ = store.insert(row(), kind="create")
    running, _ = store.move(created, S.RUNNING)
    sessions = [SessionRow(session_id=f"ses-{i}", sandbox_id="sbx-1", kind="python", record={"i": i}, opened_at=i)
                for i in range(3)]
    store.add_sessions(sessions)
    store.drop_sessions("sbx-1", ["ses-1", "ses-9"])
    store.drop_sessions("sbx-2", ["ses-0"])
    assert store.sessions("sbx-1") == [sessions[0], sessions[2]]
    store.move(running, S.DEAD, reason="x")
    assert store.sessions("sbx-1") == []


def test_leases_round_trip(store: Store) -> None:
    lease = LeaseRow(lease="run", owner_pid=3, owner_start=4, ttl_s=None, created_at=1.0, heartbeat_at=2.0)
    store.put_lease(lease)
    store.put_lease(lease)
    assert store.leases() == [lease]
    store.delete_lease("run")
    store.delete_lease("run")
    assert store.leases() == []


def test_history_is_forgotten_but_never_the_living(store: Store) -> None:
    for i in range(3):
        created, operation = store.insert(row(f"sbx-{i}"), kind="create")
        running, _ = store.move(created, S.RUNNING, result_of=operation, outcome="ok", event="created")
        if i:
            store.move(running, S.DEAD, reason="x", event="died")
    assert store.forget_dead(older_than=0.0) == 0
    assert store.forget_dead(older_than=4e9) == 2
    assert [r.sandbox_id for r in store.alive()] == ["sbx-0"]
    assert store.events(0, 10) == []


def test_a_newer_file_and_a_broken_file_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "newer.sqlite"
    db = sqlite3.connect(path)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(IntegrityError, match="schema version 99"):
        Store(path)
    broken = tmp_path / "broken.sqlite"
    broken.write_bytes(b"not a database, but long enough to look at" * 100)
    with pytest.raises(SandboxError, match="broken"):
        Store(broken)


WRITER = """
import os, sys
from pathlib import Path
from tidemill.core.sandbox_api import SandboxState as S
from tidemill.sandbox.store import SandboxRow, Store
store = Store(Path(sys.argv[1]))
store.begin_daemon(os.getpid(), 1)
steps = int(sys.argv[2])
row, op = store.insert(SandboxRow(sandbox_id="sbx-1", template="base", backend="fake", state=S.CREATING, lease="",
                                  parent_id="", generation=0, created_at=1.0, expires_at=2.0), kind="create")
if steps > 0: row, _ = store.move(row, S.RUNNING, record={"x": 1}, result_of=op, outcome="ok")
if steps > 1: row, op = store.move(row, S.PAUSING, intent="pause")
if steps > 2: row, _ = store.move(row, S.PAUSED, result_of=op, outcome="ok")
if steps > 3:
    store._db.execute("BEGIN IMMEDIATE")
    store._db.execute("UPDATE sandboxes SET state = 'dead'")
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(("steps", "state", "opened"), [
    (0, S.CREATING, ["create"]), (1, S.RUNNING, []), (2, S.PAUSING, ["pause"]), (3, S.PAUSED, []), (4, S.PAUSED, [])])
def test_kill_9_between_rows_leaves_exactly_what_was_committed(tmp_path: Path, steps: int, state: S,
                                                               opened: list[str]) -> None:
    path = tmp_path / "store.sqlite"
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(steps)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as writer:
        assert writer.stdout
        assert writer.stdout.readline() == b"ready\n"
        writer.send_signal(signal.SIGKILL)
    store = Store(path)
    assert store.begin_daemon(os.getpid(), 1) == 2
    assert [r.state for r in store.alive()] == [state]
    assert [o.kind for o in store.open_operations()] == opened
    store.close()


def test_checkpoint_empties_the_log_and_keeps_the_rows(tmp_path: Path, store: Store) -> None:
    created, _ = store.insert(row(), kind="create")
    wal = tmp_path / "store.sqlite-wal"
    assert wal.stat().st_size > 0
    store.checkpoint()
    assert wal.stat().st_size == 0
    assert store.get("sbx-1") == created


def test_the_lock_names_its_holder_and_dies_with_it(tmp_path: Path) -> None:
    assert lock_holder(tmp_path) is None
    with StateLock(tmp_path):
        assert lock_holder(tmp_path) == os.getpid()
        with pytest.raises(BusyError, match=f"pid {os.getpid()}"):
            StateLock(tmp_path).acquire()
    assert lock_holder(tmp_path) is None
    code = ("import sys; from pathlib import Path; from tidemill.sandbox.store import StateLock\n"
            "StateLock(Path(sys.argv[1])).acquire(); print('held', flush=True); sys.stdin.read()")
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == b"held\n"
        assert lock_holder(tmp_path) == holder.pid
        with pytest.raises(BusyError, match=f"pid {holder.pid}"):
            StateLock(tmp_path).acquire()
        holder.send_signal(signal.SIGKILL)
    with StateLock(tmp_path) as lock:
        assert lock_holder(tmp_path) == os.getpid()
        lock.release()
        lock.release()
