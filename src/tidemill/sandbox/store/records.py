"""Rows of the store as values. Times are Unix seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tidemill.core.sandbox_api import SandboxInfo, SandboxState


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxRow:
    """One sandbox.

    runtime_id  the name the backend gave its processes and folders; differs from sandbox_id after a full reset
    record      what the backend needs to attach to it again; None until it has started
    daemon      generation of the service that last changed the row
    reason      why it is dead, or empty
    """

    sandbox_id: str
    template: str
    backend: str
    state: SandboxState
    lease: str
    parent_id: str
    generation: int
    created_at: float
    expires_at: float
    metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    runtime_id: str = ""
    record: Mapping[str, Any] | None = None
    daemon: int = 0
    updated_at: float = 0.0
    reason: str = ""

    def info(self) -> SandboxInfo:
        """The part callers see."""
        return SandboxInfo(
            sandbox_id=self.sandbox_id, template=self.template, backend=self.backend, state=self.state,
            lease=self.lease, parent_id=self.parent_id, generation=self.generation, created_at=self.created_at,
            expires_at=self.expires_at, metadata=dict(self.metadata),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """A live session, so that a restarted service finds it again under the same id. A fork's children have
    the sessions of their source under the same ids, so an id is unique within its sandbox only."""

    sandbox_id: str
    session_id: str
    kind: str
    record: Mapping[str, Any]
    opened_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationRow:
    """An intent (finished_at None) or its result."""

    operation_id: int
    sandbox_id: str
    kind: str
    daemon: int
    started_at: float
    finished_at: float | None
    outcome: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRow:
    """A group of sandboxes that ends with its owner.

    owner_pid, owner_start  the owning process; both None if the lease lives by heartbeats alone
    ttl_s                   the lease ends this long after the last heartbeat; None: heartbeats are not needed
    lost_at                 when the owner was first found gone; the sandboxes end after a grace period
    """

    lease: str
    owner_pid: int | None
    owner_start: int | None
    ttl_s: float | None
    created_at: float
    heartbeat_at: float
    lost_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """Something that happened, for callers who follow along."""

    seq: int
    at: float
    sandbox_id: str
    lease: str
    kind: str
    detail: str
