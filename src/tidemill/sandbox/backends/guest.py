"""What every guest that runs our agent has in common: commands, sessions and files over its channel.

Backends add what depends on the runtime: freezing, copying, ending. Defaults of the environment a command
sees stand here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tidemill.core.errors import DeadlineError, InputError, NotFoundError, SandboxDiedError
from tidemill.core.sandbox_api import ExecResult
from tidemill.sandbox.backends.base import ResetReport
from tidemill.sandbox.backends.channel import Call, Channel
from tidemill.sandbox.guest.protocol import Tag, Type, decode_fields, numbers

USERS = {"user": 1000, "root": 0}
HOME = "/home/user"
GRACE_S = 15.0
"""How much longer than the guest's own deadline the host waits before it gives an answer up."""
REQUEST_S = 30.0
"""Deadline of requests that the agent answers by itself."""
RESET_S = 20.0
_BYTES_PER_S = 1 << 20
"""Slowest file transfer still waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GuestLimits:
    """Limits the guest's kernel enforces on what users run; 0: none.

    nproc          processes and threads of the user, in the whole sandbox
    address_space  bytes of virtual memory per process
    nofile         open files per process
    """

    nproc: int = 512
    address_space: int = 8 << 30
    nofile: int = 1024

    def fields(self) -> list[tuple[int, int | bytes | str]]:
        """As fields of a request."""
        return [(Tag.NPROC, self.nproc), (Tag.ADDRESS_SPACE, self.address_space), (Tag.NOFILE, self.nofile)]


def environment(user: str, extra: Mapping[str, str]) -> dict[str, str]:
    """What a command of `user` sees. Raises InputError for a name or value that cannot be a variable."""
    for name, value in extra.items():
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise InputError(
                f"env[{name!r}]: a variable's name may not be empty or hold '=', and neither part a zero byte.",
                field="env",
            )
    home = HOME if user == "user" else "/root"
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
        "HOME": home,
        "USER": user,
        "LOGNAME": user,
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        **extra,
    }


def read_result(call: Call, payload: bytes) -> ExecResult:
    """The end of a command or cell, with what it wrote."""
    fields = numbers(payload)
    return ExecResult(
        exit_code=fields.get(Tag.EXIT_CODE),
        stdout=bytes(call.stdout),
        stderr=bytes(call.stderr),
        duration_ms=fields.get(Tag.DURATION_US, 0) / 1e3,
        timed_out=bool(fields.get(Tag.TIMED_OUT)),
        truncated=bool(fields.get(Tag.TRUNCATED)),
        signal=fields.get(Tag.SIGNAL, 0),
    )


def milliseconds(timeout_s: float) -> int:
    """A deadline for the guest, at least 1 ms. Raises InputError unless positive."""
    if not 0 < timeout_s < 1e8:
        raise InputError(f"timeout_s = {timeout_s!r}: expected more than 0 seconds.", field="timeout_s")
    return max(1, round(timeout_s * 1000))


class AgentSession:
    """GuestSession by its number in the guest."""

    def __init__(self, channel: Channel, number: int, kind: str) -> None:
        self._channel = channel
        self._number = number
        self._kind = kind
        self._ended = False

    @property
    def kind(self) -> str:
        return self._kind

    def record(self) -> Mapping[str, Any]:
        return {"session": self._number, "kind": self._kind}

    async def run(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        if self._ended:
            raise NotFoundError(f"session {self._number} of {self._channel.label} has ended.")
        if "\0" in code:
            raise InputError("code holds a zero byte.", field="code")
        call = self._channel.request(
            Type.SESSION_RUN,
            [
                (Tag.SESSION, self._number),
                (Tag.TIMEOUT_MS, milliseconds(timeout_s)),
                (Tag.OUTPUT_LIMIT, max_output_bytes),
                (Tag.CODE, code),
            ],
        )
        try:
            answer = await self._channel.finish(
                call, timeout_s=timeout_s + GRACE_S, what=f"a cell in its {self._kind}"
            )
        except (asyncio.CancelledError, DeadlineError):
            self._ended = True
            raise
        result = read_result(call, answer)
        self._ended = result.timed_out or result.exit_code is None
        return result

    async def close(self) -> None:
        if self._ended or self._channel.closed:
            return
        self._ended = True
        call = self._channel.request(Type.SESSION_CLOSE, [(Tag.SESSION, self._number)])
        await self._channel.finish(call, timeout_s=REQUEST_S, what="closing a session")


class AgentGuest:
    """The runtime-independent half of Guest. `generation` counts copies since the template."""

    def __init__(
        self, runtime_id: str, channel: Channel, *, limits: GuestLimits, generation: int = 0
    ) -> None:
        self._runtime_id = runtime_id
        self.channel = channel
        self.limits = limits
        self.generation = generation
        self._paused = False

    @property
    def runtime_id(self) -> str:
        return self._runtime_id

    @property
    def paused(self) -> bool:
        return self._paused

    async def hello(self) -> None:
        """See base.Guest; a running guest is asked itself."""
        await self.channel.list_sessions(timeout_s=REQUEST_S)

    async def exec(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes,
        env: Mapping[str, str],
        cwd: str,
        user: str,
        timeout_s: float,
        max_output_bytes: int,
    ) -> ExecResult:
        if user not in USERS:
            raise InputError(f"user = {user!r}: expected user or root.", field="user")
        if not argv or not argv[0]:
            raise InputError("argv is empty.", field="argv")
        if any("\0" in word for word in (*argv, cwd)):
            raise InputError("argv or cwd holds a zero byte.", field="argv")
        fields: list[tuple[int, int | bytes | str]] = [(Tag.ARGV, word) for word in argv]
        fields += [(Tag.ENV, f"{name}={value}") for name, value in environment(user, env).items()]
        fields += [
            (Tag.CWD, cwd or (HOME if user == "user" else "/")),
            (Tag.UID, USERS[user]),
            (Tag.TIMEOUT_MS, milliseconds(timeout_s)),
            (Tag.OUTPUT_LIMIT, max_output_bytes),
            (Tag.STDIN, int(bool(stdin))),
        ]
        call = self.channel.request(Type.EXEC, fields + (self.limits.fields() if user != "root" else []))
        sender = asyncio.ensure_future(call.send_data(stdin)) if stdin else None
        try:
            answer = await self.channel.finish(call, timeout_s=timeout_s + GRACE_S, what=f"`{argv[0]}`")
        finally:
            if sender is not None:
                sender.cancel()
                await asyncio.gather(sender, return_exceptions=True)
        return read_result(call, answer)

    async def open_session(self, kind: str) -> AgentSession:
        if kind not in ("sh", "python"):
            raise InputError(f"kind = {kind!r}: expected sh or python.", field="kind")
        env = [(Tag.ENV, f"{name}={value}") for name, value in environment("user", {}).items()]
        call = self.channel.request(Type.SESSION_OPEN, [(Tag.KIND, kind), *env, *self.limits.fields()])
        answer = await self.channel.finish(call, timeout_s=REQUEST_S, what=f"opening {kind}")
        return AgentSession(self.channel, numbers(answer).get(Tag.SESSION, 0), kind)

    async def attach_session(self, record: Mapping[str, Any]) -> AgentSession:
        number, kind = record["session"], record["kind"]
        if all(entry.session != number for entry in await self.channel.list_sessions()):
            raise NotFoundError(f"session {number} of {self.channel.label} has ended.")
        return AgentSession(self.channel, number, kind)

    async def write_file(self, path: str, data: bytes, *, mode: int) -> None:
        _check_path(path)
        call = self.channel.request(
            Type.PUT, [(Tag.PATH, path), (Tag.MODE, mode), (Tag.MAX_BYTES, len(data))]
        )
        timeout_s = REQUEST_S + len(data) / _BYTES_PER_S
        sender = asyncio.ensure_future(call.send_data(data))
        try:
            await self.channel.finish(call, timeout_s=timeout_s, what=f"writing {path}")
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        _check_path(path)
        call = self.channel.request(Type.GET, [(Tag.PATH, path), (Tag.MAX_BYTES, max_bytes)])
        await self.channel.finish(
            call, timeout_s=REQUEST_S + max_bytes / _BYTES_PER_S, what=f"reading {path}"
        )
        return bytes(call.stdout)

    async def reset(self) -> ResetReport:
        answer = await self.channel.finish(
            self.channel.request(Type.RESET, ()), timeout_s=RESET_S, what="reset"
        )
        fields = numbers(answer)
        detail = next(
            (raw.decode("utf-8", "replace") for tag, raw in decode_fields(answer) if tag == Tag.DETAIL), ""
        )
        return ResetReport(
            needs_full_reset=bool(fields.get(Tag.NEEDS_FULL, 1)),
            detail=detail,
            processes_ended=fields.get(Tag.PROCESSES, 0),
        )

    async def detach(self) -> None:
        self.channel.close()

    def check_alive(self) -> None:
        """Raises SandboxDiedError if the channel is closed."""
        if self.channel.closed:
            raise SandboxDiedError(f"{self.channel.label} is gone.")


def _check_path(path: str) -> None:
    if not path or "\0" in path:
        raise InputError(f"path = {path!r}: expected a file name without zero bytes.", field="path")
