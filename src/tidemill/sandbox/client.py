"""LocalSandboxClient: the service on this machine behind the protocols of tidemill.core.sandbox_api.

One call is one request on a kept connection. Errors come back as the classes the service raised. A cancelled
command is ended in the guest; a cancelled create ends what it made. Leases named in `create` are registered
for this process, so that their sandboxes end with it even if it is killed.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
from collections.abc import Coroutine, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

from tidemill.core.errors import InputError, NotFoundError, SandboxDiedError, TidemillError
from tidemill.core.launcher import start_time
from tidemill.core.sandbox_api import Capabilities, ExecResult, Sandbox, SandboxInfo, SandboxState
from tidemill.sandbox.api.errors import error_from_answer, error_from_body
from tidemill.sandbox.api.schema import MAX_FILE_BYTES, MAX_JSON_BYTES
from tidemill.sandbox.wire import Address, Answer, ConnectionPool

log = logging.getLogger(__name__)

_MARGIN_S = 30.0
"""What a call may take beyond the guest's own deadline before the service counts as unresponsive."""
_LIFE_S = 180.0
"""For life-changing calls, which may wait for their turn."""
_PAGE = 100


class LocalSession:
    """LiveSession over the service."""

    def __init__(self, sandbox: LocalSandbox, session_id: str, kind: str) -> None:
        self._sandbox = sandbox
        self._kind = kind
        self.session_id = session_id
        self._run = f"/x/v1/sandboxes/{sandbox.sandbox_id}/sessions/{session_id}/run"

    @property
    def kind(self) -> str:
        return self._kind

    async def run(self, code: str, *, timeout_s: float = 10.0, max_output_bytes: int = 65_536) -> ExecResult:
        body = {"code": code, "timeout": timeout_s, "maxOutputBytes": max_output_bytes}
        return _result(await self._sandbox.client.call("POST", self._run, body, timeout_s=timeout_s + _MARGIN_S))

    async def close(self) -> None:
        path = f"/x/v1/sandboxes/{self._sandbox.sandbox_id}/sessions/{self.session_id}"
        try:
            await self._sandbox.client.call("DELETE", path)
        except (NotFoundError, SandboxDiedError):
            return


class LocalSandbox:
    """Sandbox over the service. Holds no resource of its own."""

    def __init__(self, client: LocalSandboxClient, sandbox_id: str) -> None:
        self.client = client
        self._id = sandbox_id
        self._path = f"/sandboxes/{sandbox_id}"
        self._x = f"/x/v1/sandboxes/{sandbox_id}"

    @property
    def sandbox_id(self) -> str:
        return self._id

    async def info(self) -> SandboxInfo:
        return _info(await self.client.call("GET", self._path))

    async def exec(self, argv: Sequence[str], *, stdin: bytes = b"", env: Mapping[str, str] | None = None,
                   cwd: str = "", user: str = "user", timeout_s: float = 30.0,
                   max_output_bytes: int = 1 << 20) -> ExecResult:
        body: dict[str, Any] = {"argv": list(argv), "user": user, "timeout": timeout_s,
                                "maxOutputBytes": max_output_bytes}
        _check_size("stdin", len(stdin), MAX_JSON_BYTES // 2)
        if stdin:
            body["stdin"] = base64.b64encode(stdin).decode()
        if env:
            body["env"] = dict(env)
        if cwd:
            body["cwd"] = cwd
        return _result(await self.client.call("POST", f"{self._x}/exec", body, timeout_s=timeout_s + _MARGIN_S))

    async def open_session(self, kind: str = "sh") -> LocalSession:
        made = await self.client.call("POST", f"{self._x}/sessions", {"kind": kind}, timeout_s=_LIFE_S)
        return LocalSession(self, made["sessionID"], made["kind"])

    async def sessions(self) -> list[LocalSession]:
        """Live sessions, also those a fork inherited or an earlier client opened."""
        found = await self.client.call("GET", f"{self._x}/sessions")
        return [LocalSession(self, item["sessionID"], item["kind"]) for item in found]

    async def write_file(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        _check_size("data", len(data), MAX_FILE_BYTES)
        target = f"{self._x}/files?path={quote(path, safe='/')}&mode={mode:o}"
        await self.client.send("PUT", target, data, content_type="application/octet-stream", timeout_s=_LIFE_S)

    async def read_file(self, path: str, *, max_bytes: int = 1 << 24) -> bytes:
        target = f"{self._x}/files?path={quote(path, safe='/')}&maxBytes={max_bytes}"
        return (await self.client.send("GET", target, timeout_s=_LIFE_S)).body

    async def pause(self) -> None:
        await self.client.call("POST", f"{self._path}/pause", {}, timeout_s=_LIFE_S)

    async def resume(self) -> None:
        await self.client.call("POST", f"{self._path}/resume", {}, timeout_s=_LIFE_S)

    async def set_timeout(self, timeout_s: float) -> None:
        """It ends `timeout_s` from now."""
        await self.client.call("POST", f"{self._path}/timeout", {"timeout": timeout_s})

    async def fork(self, n: int = 1) -> list[Sandbox]:
        """As the protocol; if some copies fail, the others are ended and the first error is raised."""
        made = await self.try_fork(n)
        good: list[Sandbox] = [m for m in made if isinstance(m, LocalSandbox)]
        bad = [m for m in made if isinstance(m, TidemillError)]
        if bad:
            await asyncio.gather(*(m.kill() for m in good))
            raise bad[0]
        return good

    async def try_fork(self, n: int = 1) -> list[LocalSandbox | TidemillError]:
        """n copies, one entry each; a failed one is its error and the others are usable."""
        return await self.client.make("POST", f"{self._path}/fork", {"count": n})

    async def reset(self) -> None:
        await self.reset_how()

    async def reset_how(self) -> str:
        """Reset, and say how: `in_guest` or `replaced` (a new guest under the same id)."""
        return (await self.client.call("POST", f"{self._x}/reset", {}, timeout_s=_LIFE_S))["how"]

    async def kill(self) -> None:
        try:
            await self.client.call("DELETE", self._path, timeout_s=_LIFE_S)
        except (SandboxDiedError, NotFoundError):
            return


class LocalSandboxClient:
    """SandboxClient over one service. Belongs to one event loop; close it when done.

    address     a state folder, or an Address
    own_leases  register leases named in `create` for this process; False where another process owns them
    """

    def __init__(self, address: Path | Address, *, own_leases: bool = True) -> None:
        if isinstance(address, Path):
            address = Address(socket=address / "daemon.sock")
        self._pool = ConnectionPool(address)
        self._own_leases = own_leases
        self._joined: dict[str, asyncio.Task[Any]] = {}
        self._undoing: set[asyncio.Task[Any]] = set()

    # ---- SandboxClient

    async def create(self, *, template: str = "base", backend: str = "", lease: str = "", timeout_s: float = 3600.0,
                     metadata: Mapping[str, str] | None = None) -> LocalSandbox:
        await self._join(lease)
        body = _create_body(template, backend, lease, timeout_s, metadata)
        made = (await self.make("POST", "/v2/sandboxes", body))[0]
        if not isinstance(made, LocalSandbox):
            raise made
        return made

    async def create_many(self, count: int, *, template: str = "base", backend: str = "", lease: str = "",
                          timeout_s: float = 3600.0, metadata: Mapping[str, str] | None = None
                          ) -> list[LocalSandbox | TidemillError]:
        """`count` sandboxes in one request; a failed one is its error."""
        await self._join(lease)
        body = _create_body(template, backend, lease, timeout_s, metadata) | {"count": count}
        return await self.make("POST", "/x/v1/sandboxes/batch", body)

    async def connect(self, sandbox_id: str) -> LocalSandbox:
        sandbox = self.handle(quote(sandbox_id, safe=""))
        await sandbox.info()
        return sandbox

    def handle(self, sandbox_id: str) -> LocalSandbox:
        """The sandbox with this id, without asking whether it exists."""
        return LocalSandbox(self, sandbox_id)

    async def list(self, *, lease: str = "") -> Sequence[SandboxInfo]:
        found: list[SandboxInfo] = []
        token = ""
        while True:
            query = f"limit={_PAGE}" + (f"&lease={quote(lease, safe='')}" if lease else "") + (
                f"&nextToken={quote(token, safe='')}" if token else "")
            answer = await self.send("GET", f"/v2/sandboxes?{query}")
            found += [_info(item) for item in json.loads(answer.body)]
            token = answer.headers.get("x-next-token", "")
            if not token:
                return found

    async def release_lease(self, lease: str) -> int:
        self._joined.pop(lease, None)
        answer = await self.call("DELETE", f"/x/v1/leases/{quote(lease, safe='')}", timeout_s=_LIFE_S)
        return int(answer["ended"])

    async def capabilities(self) -> Capabilities:
        return await self.capabilities_of("")

    async def close(self) -> None:
        """Wait for creates that were cancelled to be undone, then close the connections."""
        if self._undoing:
            await asyncio.wait(set(self._undoing), timeout=_LIFE_S)
        await self._pool.close()

    # ---- beyond the protocol

    @property
    def address(self) -> Address:
        """Where the service is."""
        return self._pool.address

    @property
    def undoing(self) -> int:
        """Cancelled creates that are still being undone."""
        return len(self._undoing)

    async def capabilities_of(self, backend: str) -> Capabilities:
        """Of one backend by name."""
        query = f"?backend={quote(backend, safe='')}" if backend else ""
        record = await self.call("GET", f"/x/v1/capabilities{query}", timeout_s=_LIFE_S)
        return Capabilities(
            backend=record["backend"], isolation=record["isolation"], pause=record["pause"],
            snapshot=record["snapshot"], fork=record["fork"], cow_memory=record["cowMemory"],
            external_tcp=record["externalTcp"],
            survives_daemon=record["survivesDaemon"], detail=record["detail"])

    async def health(self) -> dict[str, Any]:
        """What answers: {status, pid, generation, version, sandboxes}."""
        return await self.call("GET", "/health", timeout_s=10.0)

    async def join_lease(self, lease: str, *, ttl_s: float | None = None, own: bool = True) -> dict[str, Any]:
        """Register a lease, for this process if `own`; {how, sandboxes, ...}. With `ttl_s` call `heartbeat`
        more often."""
        body: dict[str, Any] = {"lease": lease}
        if own:
            body |= {"ownerPid": os.getpid(), "ownerStart": start_time(os.getpid())}
        if ttl_s is not None:
            body["ttl"] = ttl_s
        return await self.call("POST", "/x/v1/leases", body)

    async def heartbeat(self, lease: str) -> None:
        """Keep a lease alive."""
        await self.call("POST", f"/x/v1/leases/{quote(lease, safe='')}/heartbeat", {})

    async def send(self, method: str, target: str, body: bytes = b"", *, content_type: str = "application/json",
                   timeout_s: float = 60.0) -> Answer:
        """One request; raises what the service raised."""
        answer = await self._pool.request(method, target, body, content_type=content_type, timeout_s=timeout_s)
        if answer.status >= 400:
            raise error_from_answer(answer.status, answer.body)
        return answer

    async def call(self, method: str, target: str, body: Any = None, *, timeout_s: float = 60.0) -> Any:
        """`send` with JSON in and out; None for an empty answer."""
        raw = b"" if body is None else json.dumps(body, separators=(",", ":"), allow_nan=False).encode()
        answer = await self.send(method, target, raw, timeout_s=timeout_s)
        return json.loads(answer.body) if answer.body else None

    async def make(self, method: str, target: str, body: Any) -> list[LocalSandbox | TidemillError]:
        """A call that makes sandboxes. If the caller is cancelled, what is made all the same is ended afterwards."""
        task = asyncio.create_task(self._make(method, target, body))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._later(self._undo(task))
            raise

    async def _make(self, method: str, target: str, body: Any) -> list[LocalSandbox | TidemillError]:
        made = await self.call(method, target, body, timeout_s=_LIFE_S)
        items = cast("list[dict[str, Any]]", made if isinstance(made, list) else [{"sandbox": made}])
        return [self.handle(item["sandbox"]["sandboxID"]) if "sandbox" in item else error_from_body(item["error"])
                for item in items]

    async def _undo(self, task: asyncio.Task[list[LocalSandbox | TidemillError]]) -> None:
        try:
            made = await task
            await asyncio.gather(*(m.kill() for m in made if isinstance(m, LocalSandbox)))
        except TidemillError as e:
            log.info("a cancelled create ended with: %s", e)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._undoing.add(task)
        task.add_done_callback(self._undoing.discard)

    async def _join(self, lease: str) -> None:
        if not lease or not self._own_leases:
            return
        if lease not in self._joined:
            self._joined[lease] = asyncio.create_task(self.join_lease(lease))
        task = self._joined[lease]
        try:
            await asyncio.shield(task)
        except TidemillError:
            if self._joined.get(lease) is task:
                del self._joined[lease]
            raise


def _check_size(field: str, size: int, limit: int) -> None:
    """The service would refuse it and close the connection while we still send."""
    if size > limit:
        raise InputError(f"{field} has {size} bytes, more than {limit}.", field=field,
                         remedy="Split it into several files.")


def _create_body(template: str, backend: str, lease: str, timeout_s: float,
                 metadata: Mapping[str, str] | None) -> dict[str, Any]:
    return {"templateID": template, "backend": backend, "lease": lease, "timeout": timeout_s,
            "metadata": dict(metadata or {})}


def _result(raw: Mapping[str, Any]) -> ExecResult:
    return ExecResult(
        exit_code=raw["exitCode"], stdout=base64.b64decode(raw["stdout"]), stderr=base64.b64decode(raw["stderr"]),
        duration_ms=raw["durationMs"], timed_out=raw["timedOut"], truncated=raw["truncated"], signal=raw["signal"])


def _info(raw: Mapping[str, Any]) -> SandboxInfo:
    return SandboxInfo(
        sandbox_id=raw["sandboxID"], template=raw["templateID"], backend=raw["backend"],
        state=SandboxState(raw["phase"]), lease=raw["lease"], parent_id=raw["parentID"], generation=raw["generation"],
        created_at=datetime.fromisoformat(raw["startedAt"]).timestamp(),
        expires_at=datetime.fromisoformat(raw["endAt"]).timestamp(), metadata=raw["metadata"])
