"""Tables of the store and how an older file becomes a newer one.

`PRAGMA user_version` holds the number of migrations applied. A file from a newer version is refused, never
guessed at.
"""

from __future__ import annotations

import sqlite3

from tidemill.core.errors import IntegrityError

MIGRATIONS: tuple[str, ...] = (
    """
    CREATE TABLE daemons (
        generation INTEGER PRIMARY KEY AUTOINCREMENT,
        pid        INTEGER NOT NULL,
        pid_start  INTEGER NOT NULL,
        started_at REAL NOT NULL,
        stopped_at REAL
    );
    CREATE TABLE leases (
        lease        TEXT PRIMARY KEY,
        owner_pid    INTEGER,
        owner_start  INTEGER,
        ttl_s        REAL,
        created_at   REAL NOT NULL,
        heartbeat_at REAL NOT NULL,
        lost_at      REAL
    );
    CREATE TABLE sandboxes (
        sandbox_id TEXT PRIMARY KEY,
        template   TEXT NOT NULL,
        backend    TEXT NOT NULL,
        state      TEXT NOT NULL,
        lease      TEXT NOT NULL,
        parent_id  TEXT NOT NULL,
        generation INTEGER NOT NULL,
        created_at REAL NOT NULL,
        expires_at REAL NOT NULL,
        metadata   TEXT NOT NULL,
        runtime_id TEXT NOT NULL,
        record     TEXT,
        daemon     INTEGER NOT NULL REFERENCES daemons (generation),
        updated_at REAL NOT NULL,
        reason     TEXT NOT NULL DEFAULT ''
    );
    CREATE INDEX sandboxes_by_lease ON sandboxes (lease);
    CREATE INDEX sandboxes_alive ON sandboxes (state) WHERE state <> 'dead';
    CREATE TABLE sessions (
        sandbox_id TEXT NOT NULL REFERENCES sandboxes (sandbox_id) ON DELETE CASCADE,
        session_id TEXT NOT NULL,
        kind       TEXT NOT NULL,
        record     TEXT NOT NULL,
        opened_at  REAL NOT NULL,
        PRIMARY KEY (sandbox_id, session_id)
    ) WITHOUT ROWID;
    CREATE TABLE operations (
        operation_id INTEGER PRIMARY KEY AUTOINCREMENT,
        sandbox_id   TEXT NOT NULL,
        kind         TEXT NOT NULL,
        daemon       INTEGER NOT NULL,
        started_at   REAL NOT NULL,
        finished_at  REAL,
        outcome      TEXT NOT NULL DEFAULT '',
        detail       TEXT NOT NULL DEFAULT '{}'
    );
    CREATE INDEX operations_open ON operations (sandbox_id) WHERE finished_at IS NULL;
    CREATE TABLE events (
        seq        INTEGER PRIMARY KEY AUTOINCREMENT,
        at         REAL NOT NULL,
        sandbox_id TEXT NOT NULL,
        lease      TEXT NOT NULL,
        kind       TEXT NOT NULL,
        detail     TEXT NOT NULL DEFAULT ''
    );
    CREATE TABLE snapshots (
        snapshot_id TEXT PRIMARY KEY,
        sandbox_id  TEXT NOT NULL,
        backend     TEXT NOT NULL,
        path        TEXT NOT NULL,
        state       TEXT NOT NULL,
        created_at  REAL NOT NULL
    );
    """,
)


def migrate(db: sqlite3.Connection, path: str) -> int:
    """Bring an opened file to the newest version and return it. Raises IntegrityError for a newer file."""
    version = int(db.execute("PRAGMA user_version").fetchone()[0])
    if version > len(MIGRATIONS):
        raise IntegrityError(f"{path} has schema version {version}, this tidemill knows up to {len(MIGRATIONS)}.",
                             remedy="Use the newer tidemill, or another state folder.")
    for number in range(version, len(MIGRATIONS)):
        db.executescript(f"BEGIN IMMEDIATE; {MIGRATIONS[number]} PRAGMA user_version = {number + 1}; COMMIT;")
    return len(MIGRATIONS)
