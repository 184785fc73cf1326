"""A backend without guests, for tests of everything above backends: memory instead of processes, a few
commands instead of a system, and faults on request.

It honours the whole contract of base.py. The "machine" that outlives the service is a FakeMachine: a service
that is gone and its successor share one, as they share a kernel. Commands: true, false, echo, cat [FILE],
sleep, env, whoami, pwd, yes, and `sh -c` with one of them. Sessions: `sh` knows NAME=value, `echo $NAME` and
the commands; `python` evaluates assignments and expressions of literals, names and arithmetic.
"""

from __future__ import annotations

import ast
import asyncio
import copy
import operator
import shlex
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidemill.core.errors import InputError, NotFoundError, SandboxDiedError, SandboxError, TidemillError
from tidemill.core.sandbox_api import Capabilities, ExecResult
from tidemill.sandbox.backends.base import Guest, ResetReport


@dataclass
class FakeProcess:
    """A live session as guest state."""

    kind: str
    names: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass
class FakeBox:
    """One guest as the machine holds it."""

    template: str
    files: dict[str, bytes] = field(default_factory=dict[str, bytes])
    processes: dict[str, FakeProcess] = field(default_factory=dict[str, FakeProcess])
    paused: bool = False
    counter: int = 0
    running: asyncio.Event = field(default_factory=asyncio.Event)
    gone: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass
class FakeMachine:
    """What outlives the service: guests by name, and the faults to inject.

    `fault` is called with the point's name (create, started, exec, run, open_session, pause, resume, fork,
    fork_child, reset, kill, attach, destroy) before the effect, and may raise, or return "full" at `reset` to
    ask for a full one. Raising at `started` leaves a box behind, as a backend whose own cleaning up fails.
    """

    boxes: dict[str, FakeBox] = field(default_factory=dict[str, FakeBox])
    fault: Callable[[str], str | None] = lambda point: None
    delay_s: float = 0.0
    can_pause: bool = True
    can_fork: bool = True


class FakeSession:
    """GuestSession over a FakeProcess."""

    def __init__(self, guest: FakeGuest, key: str, kind: str) -> None:
        self._guest = guest
        self._key = key
        self._kind = kind

    @property
    def kind(self) -> str:
        return self._kind

    def record(self) -> Mapping[str, Any]:
        return {"key": self._key, "kind": self._kind}

    async def run(self, code: str, *, timeout_s: float, max_output_bytes: int) -> ExecResult:
        box = await self._guest.awake()
        process = box.processes.get(self._key)
        if process is None:
            raise NotFoundError(f"session {self._key} has ended.")
        self._guest.machine.fault("run")
        try:
            argv = shlex.split(code) if self._kind == "sh" else []
            if argv[:1] == ["sleep"] or code.startswith("sleep("):
                seconds = float(argv[1] if argv else code[6:-1])
                result = await self._guest.sleep(box, seconds, timeout_s)
            else:
                result = _cut(_sh(box, process, argv) if argv else _python(process, code), max_output_bytes)
        except asyncio.CancelledError:
            box.processes.pop(self._key, None)
            raise
        if result.timed_out:
            box.processes.pop(self._key, None)
        return result

    async def close(self) -> None:
        box = self._guest.machine.boxes.get(self._guest.runtime_id)
        if box is not None:
            box.processes.pop(self._key, None)


class FakeGuest:
    """Guest over a FakeBox."""

    def __init__(self, machine: FakeMachine, runtime_id: str) -> None:
        self.machine = machine
        self._runtime_id = runtime_id

    @property
    def runtime_id(self) -> str:
        return self._runtime_id

    @property
    def paused(self) -> bool:
        return self._box().paused

    def record(self) -> Mapping[str, Any]:
        return {"runtime_id": self._runtime_id}

    def _box(self) -> FakeBox:
        box = self.machine.boxes.get(self._runtime_id)
        if box is None:
            raise SandboxDiedError(f"{self._runtime_id} is gone.")
        return box

    async def awake(self) -> FakeBox:
        """The box, once it is not paused; dies with it."""
        box = self._box()
        await _first(box.running.wait(), box.gone.wait())
        return self._box()

    async def sleep(self, box: FakeBox, seconds: float, timeout_s: float) -> ExecResult:
        """Time in the guest: ends with the deadline or the guest."""
        started = time.monotonic()
        await _first(asyncio.sleep(min(seconds, timeout_s)), box.gone.wait())
        self._box()
        late = seconds > timeout_s
        return ExecResult(exit_code=None if late else 0, stdout=b"", stderr=b"", timed_out=late,
                          signal=9 if late else 0, duration_ms=(time.monotonic() - started) * 1e3)

    async def hello(self) -> None:
        self._box()

    async def exec(self, argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], cwd: str, user: str,
                   timeout_s: float, max_output_bytes: int) -> ExecResult:
        box = await self.awake()
        self.machine.fault("exec")
        words = shlex.split(argv[2]) if list(argv[:2]) == ["sh", "-c"] and len(argv) == 3 else list(argv)
        name = words[0].rpartition("/")[2] if words else ""
        if name == "sleep":
            return await self.sleep(box, float(words[1]), timeout_s)
        if name == "exit":
            return _ok(b"", code=int(words[1]))
        return _cut(_command(box, [name, *words[1:]], stdin=stdin, env=env, cwd=cwd or "/home/user", user=user),
                    max_output_bytes)

    async def open_session(self, kind: str) -> FakeSession:
        box = await self.awake()
        self.machine.fault("open_session")
        if kind not in ("sh", "python"):
            raise InputError(f"kind = {kind!r}: expected sh or python.", field="kind")
        box.counter += 1
        key = f"p{box.counter}"
        box.processes[key] = FakeProcess(kind)
        return FakeSession(self, key, kind)

    async def attach_session(self, record: Mapping[str, Any]) -> FakeSession:
        if record["key"] not in self._box().processes:
            raise NotFoundError(f"session {record['key']} has ended.")
        return FakeSession(self, record["key"], record["kind"])

    async def write_file(self, path: str, data: bytes, *, mode: int) -> None:
        box = await self.awake()
        if path.endswith("/") or any(f.startswith(f"{path}/") for f in box.files):
            raise InputError(f"path = {path!r}: is a folder.", field="path")
        box.files[path] = data

    async def read_file(self, path: str, *, max_bytes: int) -> bytes:
        box = await self.awake()
        if path not in box.files:
            raise NotFoundError(f"no file {path!r}.")
        if len(box.files[path]) > max_bytes:
            raise InputError(f"{path!r} has {len(box.files[path])} bytes, more than {max_bytes}.", field="maxBytes")
        return box.files[path]

    async def pause(self) -> None:
        box = self._box()
        self.machine.fault("pause")
        box.paused = True
        box.running.clear()

    async def resume(self) -> None:
        box = self._box()
        self.machine.fault("resume")
        box.paused = False
        box.running.set()

    async def fork(self, runtime_ids: Sequence[str]) -> Sequence[Guest | TidemillError]:
        box = self._box()
        self.machine.fault("fork")
        copies: list[Guest | TidemillError] = []
        for runtime_id in runtime_ids:
            await asyncio.sleep(self.machine.delay_s)
            try:
                self.machine.fault("fork_child")
            except TidemillError as e:
                copies.append(e)
                continue
            twin = FakeBox(template=box.template, files=dict(box.files), processes=copy.deepcopy(box.processes),
                           counter=box.counter)
            twin.running.set()
            self.machine.boxes[runtime_id] = twin
            copies.append(FakeGuest(self.machine, runtime_id))
        return copies

    async def reset(self) -> ResetReport:
        box = self._box()
        full = self.machine.fault("reset") == "full"
        ended = len(box.processes)
        box.files.clear()
        box.processes.clear()
        return ResetReport(needs_full_reset=full, detail="asked to" if full else "", processes_ended=ended)

    async def kill(self) -> None:
        self.machine.fault("kill")
        _remove(self.machine, self._runtime_id)

    async def detach(self) -> None:
        return


class FakeBackend:
    """Backend over a FakeMachine."""

    def __init__(self, machine: FakeMachine | None = None) -> None:
        self.machine = machine or FakeMachine()

    @property
    def name(self) -> str:
        return "fake"

    def capabilities(self) -> Capabilities:
        return Capabilities(backend="fake", isolation="none", pause=self.machine.can_pause, snapshot=False,
                            fork=self.machine.can_fork, cow_memory=False, external_tcp=False, survives_daemon=True)

    async def start(self) -> None:
        return

    async def templates(self) -> Sequence[str]:
        return ["base", "other"]

    async def create(self, runtime_id: str, template: str) -> FakeGuest:
        if template not in await self.templates():
            raise NotFoundError(f"no template {template!r}.")
        if runtime_id in self.machine.boxes:
            raise SandboxError(f"{runtime_id} exists.")
        await asyncio.sleep(self.machine.delay_s)
        self.machine.fault("create")
        box = self.machine.boxes[runtime_id] = FakeBox(template=template)
        self.machine.fault("started")
        box.running.set()
        return FakeGuest(self.machine, runtime_id)

    async def attach(self, record: Mapping[str, Any]) -> FakeGuest:
        self.machine.fault("attach")
        guest = FakeGuest(self.machine, record["runtime_id"])
        await guest.hello()
        return guest

    async def destroy(self, runtime_id: str) -> None:
        self.machine.fault("destroy")
        _remove(self.machine, runtime_id)

    async def reap(self, keep: Collection[str]) -> Sequence[str]:
        gone = [r for r in self.machine.boxes if r not in keep]
        for runtime_id in gone:
            _remove(self.machine, runtime_id)
        return gone

    async def close(self) -> None:
        return


def _remove(machine: FakeMachine, runtime_id: str) -> None:
    box = machine.boxes.pop(runtime_id, None)
    if box is not None:
        box.gone.set()


async def _first(*waits: Any) -> None:
    tasks = [asyncio.ensure_future(w) for w in waits]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


def _ok(out: bytes, *, err: bytes = b"", code: int = 0) -> ExecResult:
    return ExecResult(exit_code=code, stdout=out, stderr=err, duration_ms=0.0)


def _cut(result: ExecResult, limit: int) -> ExecResult:
    if len(result.stdout) <= limit:
        return result
    return ExecResult(exit_code=result.exit_code, stdout=result.stdout[:limit], stderr=result.stderr,
                      duration_ms=result.duration_ms, truncated=True)


def _command(box: FakeBox, argv: Sequence[str], *, stdin: bytes, env: Mapping[str, str], cwd: str,
             user: str) -> ExecResult:
    match list(argv):
        case ["true"]:
            return _ok(b"")
        case ["false"]:
            return _ok(b"", code=1)
        case ["echo", *words]:
            return _ok((" ".join(words) + "\n").encode())
        case ["cat"]:
            return _ok(stdin)
        case ["cat", path]:
            if path in box.files:
                return _ok(box.files[path])
            return _ok(b"", err=f"cat: {path}: No such file or directory\n".encode(), code=1)
        case ["env"]:
            return _ok("".join(f"{k}={v}\n" for k, v in env.items()).encode())
        case ["whoami"]:
            return _ok(f"{user}\n".encode())
        case ["pwd"]:
            return _ok(f"{cwd}\n".encode())
        case ["yes"]:
            return _ok(b"y\n" * (1 << 20))
        case [name, *_]:
            raise InputError(f"argv[0] = {name!r}: no such program.", field="argv")
        case _:
            raise InputError("argv is empty.", field="argv")


def _sh(box: FakeBox, process: FakeProcess, argv: Sequence[str]) -> ExecResult:
    name, equals, value = argv[0].partition("=")
    if equals and name.isidentifier():
        process.names[name] = value
        return _ok(b"")
    words = [str(process.names.get(w[1:], "")) if w.startswith("$") else w for w in argv]
    try:
        return _command(box, words, stdin=b"", env={}, cwd="/home/user", user="user")
    except InputError as e:
        return _ok(b"", err=f"sh: {e.message}\n".encode(), code=127)


_OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}


def _python(process: FakeProcess, code: str) -> ExecResult:
    try:
        out: list[str] = []
        for statement in ast.parse(code).body:
            if isinstance(statement, ast.Assign) and isinstance(target := statement.targets[0], ast.Name):
                process.names[target.id] = _value(process, statement.value)
            elif isinstance(statement, ast.Expr):
                call = statement.value
                if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "print":
                    out.append(" ".join(str(_value(process, a)) for a in call.args))
                else:
                    out.append(repr(_value(process, call)))
            else:
                raise SyntaxError(f"the fake interpreter does not know {type(statement).__name__}")
        return _ok("".join(f"{line}\n" for line in out).encode())
    except (SyntaxError, NameError, TypeError, ZeroDivisionError) as e:
        return _ok(b"", err=f"{type(e).__name__}: {e}\n".encode(), code=1)


def _value(process: FakeProcess, node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name):
        if node.id not in process.names:
            raise NameError(f"name {node.id!r} is not defined")
        return process.names[node.id]
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_value(process, node.left), _value(process, node.right))
    raise SyntaxError(f"the fake interpreter does not know {type(node).__name__}")
