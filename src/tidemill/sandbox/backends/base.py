"""The contract between the service and what really runs sandboxes.

A Backend starts guests under names the service chooses (`runtime_id`), finds them again after a restart of
the service from the record they gave, and can list and remove everything of this state folder that the
service does not know. A Guest is one of them. The service serialises life-changing calls per guest (pause,
resume, fork, reset, kill never overlap each other); exec, sessions and files run at any time beside each
other and beside them. Every call has a deadline of its own inside the backend and raises only errors of
tidemill.core.errors; SandboxDiedError means the guest is gone for good. Every call may be cancelled: what it
started in the guest is then ended, what it made on the host is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tidemill.core.errors import TidemillError
from tidemill.core.sandbox_api import Capabilities, ExecResult


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetReport:
    """What an in-guest reset found. `needs_full_reset`: the guest cannot vouch for itself; replace it by a
    new one."""

    needs_full_reset: bool = False
    detail: str = ""
    processes_ended: int = 0


class GuestSession(Protocol):
    """A live shell or interpreter inside a guest."""

    @property
    def kind(self) -> str: ...

    def record(self) -> Mapping[str, Any]:
        """JSON-able: enough for `attach_session`, also in a fork of the guest."""
        ...

    async def run(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        """One at a time. After a deadline or a cancellation the session is ended; later calls raise NotFoundError."""
        ...

    async def close(self) -> None:
        """End it; idempotent."""
        ...


class Guest(Protocol):
    """One sandbox as the backend holds it."""

    @property
    def runtime_id(self) -> str: ...

    @property
    def paused(self) -> bool:
        """As far as known without asking; true right after attaching to a guest that is frozen."""
        ...

    def record(self) -> Mapping[str, Any]:
        """JSON-able: enough for `Backend.attach` in another process."""
        ...

    async def hello(self) -> None:
        """Ask the guest for a sign of life (a paused one: ask its runtime). Raises SandboxDiedError."""
        ...

    async def exec(self, argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], cwd: str, user: str,
                   timeout_s: float, max_output_bytes: int) -> ExecResult:
        """One command to its end, deadline or cancellation. Raises InputError if it cannot start (no such program,
        user, folder)."""
        ...

    async def open_session(self, kind: str) -> GuestSession: ...

    async def attach_session(self, record: Mapping[str, Any]) -> GuestSession:
        """Find a session again. Raises NotFoundError if it has ended."""
        ...

    async def write_file(self, path: str, data: bytes, *, mode: int) -> None:
        """Create or replace, parents included. Raises InputError (a folder, no permission, no space)."""
        ...

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        """Raises NotFoundError, InputError (not a file, larger than max_bytes)."""
        ...

    async def pause(self) -> None:
        """Freeze in memory. An error other than SandboxDiedError means that it still runs."""
        ...

    async def resume(self) -> None:
        """Continue. An error other than SandboxDiedError means that it is still paused."""
        ...

    async def fork(self, runtime_ids: Sequence[str]) -> Sequence[Guest | TidemillError]:
        """Copies that go on from this state, one entry per name, in order; the source goes on running. A
        failed copy is an entry and leaves nothing behind. Raises MissingCapabilityError, or SandboxError if
        no copy could be tried."""
        ...

    async def reset(self) -> ResetReport:
        """Back to the template's state, from inside. On an error the guest must be replaced."""
        ...

    async def kill(self) -> None:
        """End it and remove everything of it on the host; idempotent; calls in flight end with SandboxDiedError."""
        ...

    async def detach(self) -> None:
        """Let go of it without touching it: close descriptors, stop readers. Idempotent."""
        ...


class Backend(Protocol):
    """Runs guests on this machine for one state folder."""

    @property
    def name(self) -> str: ...

    def capabilities(self) -> Capabilities: ...

    async def start(self) -> None:
        """Probe the machine and prepare folders. Raises SetupError with the remedy (no root, no runtime, no
        template)."""
        ...

    async def templates(self) -> Sequence[str]:
        """Names that `create` accepts."""
        ...

    async def create(self, runtime_id: str, template: str) -> Guest:
        """Start a guest and wait for its sign of life. On any failure or cancellation nothing is left. Raises
        NotFoundError for an unknown template, SetupError, SandboxError."""
        ...

    async def attach(self, record: Mapping[str, Any]) -> Guest:
        """Find a running or paused guest again. Raises SandboxDiedError."""
        ...

    async def destroy(self, runtime_id: str) -> None:
        """End and remove whatever exists under this name, in whatever condition; idempotent. Raises SandboxError."""
        ...

    async def reap(self, keep: Collection[str]) -> Sequence[str]:
        """Destroy everything of this state folder (and of no other) whose name is not in `keep`; returns the
        names."""
        ...

    async def close(self) -> None:
        """Let go of everything on the service's side. Guests run on if the capability record says that they
        can; those of a backend that cannot keep them end here. Idempotent."""
        ...
