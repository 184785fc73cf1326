"""The record of the sandbox service: one SQLite file per state folder, and the lock that makes the service
its only writer."""

from tidemill.sandbox.store.database import Store
from tidemill.sandbox.store.lock import StateLock
from tidemill.sandbox.store.records import EventRow, LeaseRow, OperationRow, SandboxRow

__all__ = ["EventRow", "LeaseRow", "OperationRow", "SandboxRow", "StateLock", "Store"]
