"""What crosses the border of the sandbox service: records, results and the client protocol agents use.

No torch, no runtime: a local daemon, an E2B endpoint and a fake in tests all look like this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol


class SandboxState(StrEnum):
    """Life of a sandbox. Legal moves stand in tidemill.sandbox.lifecycle."""

    CREATING = "creating"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    RESUMING = "resuming"
    KILLING = "killing"
    DEAD = "dead"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a backend can do, as data. A missing one is a MissingCapabilityError, never a silent downgrade."""

    backend: str
    isolation: str
    """`strong` (user-space kernel or VM), `weak` (namespaces), `none`."""
    pause: bool
    """Freeze in memory and continue."""
    snapshot: bool
    """Processes and files saved while running, restorable any number of times."""
    fork: bool
    cow_memory: bool
    external_tcp: bool
    survives_daemon: bool
    """Running sandboxes outlive the service and are adopted by the next one."""
    detail: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecResult:
    """One command or interpreter cell. Non-zero exit, a deadline and cut output are results, not errors."""

    exit_code: int | None
    """None if it was killed by its deadline or a signal (`signal` tells)."""
    stdout: bytes
    stderr: bytes
    duration_ms: float
    timed_out: bool = False
    truncated: bool = False
    signal: int = 0

    @property
    def text(self) -> str:
        """stdout as text; invalid UTF-8 becomes U+FFFD."""
        return self.stdout.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxInfo:
    """A sandbox as the store knows it. Times are Unix seconds."""

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


class LiveSession(Protocol):
    """A shell or interpreter that stays alive between calls."""

    @property
    def kind(self) -> str: ...

    async def run(self, code: str, *, timeout_s: float = 10.0, max_output_bytes: int = 65_536) -> ExecResult:
        """Run code and wait. After a passed deadline the session is gone: the next run raises NotFoundError."""
        ...

    async def close(self) -> None:
        """End it; idempotent."""
        ...


class Sandbox(Protocol):
    """One running sandbox. All methods raise SandboxDiedError if it is gone, NotFoundError if it never existed."""

    @property
    def sandbox_id(self) -> str: ...

    async def info(self) -> SandboxInfo: ...

    async def exec(
        self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None, cwd: str = "",
        user: str = "user", timeout_s: float = 30.0, max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run one command to its end, deadline or output limit (excess is drained and dropped)."""
        ...

    async def open_session(self, kind: str = "sh") -> LiveSession:
        """`sh` or `python`."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None: ...

    async def read_file(self, path: str, *, max_bytes: int = 1 << 24) -> bytes: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def fork(self, n: int = 1) -> list[Sandbox]:
        """n copies that go on from exactly this state; the source keeps running."""
        ...

    async def reset(self) -> None:
        """Back to the template's state: no process, file or variable of earlier use remains."""
        ...

    async def kill(self) -> None:
        """End it and free everything; idempotent."""
        ...


class SandboxClient(Protocol):
    """The service. `lease` groups sandboxes of one run; releasing it kills what is left."""

    async def create(self, *, template: str = "base", backend: str = "", lease: str = "", timeout_s: float = 3600.0,
                     metadata: Mapping[str, str] | None = None) -> Sandbox: ...

    async def connect(self, sandbox_id: str) -> Sandbox: ...

    async def list(self, *, lease: str = "") -> Sequence[SandboxInfo]: ...

    async def release_lease(self, lease: str) -> int:
        """Kill every sandbox of the lease; returns how many there were."""
        ...

    async def capabilities(self) -> Capabilities: ...

    async def close(self) -> None: ...
