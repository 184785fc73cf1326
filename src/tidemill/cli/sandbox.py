"""`tidemill sandbox`: set up, run, create, exec, ls, rm, and the service behind them.

Every command talks to the service of the state folder (TIDEMILL_STATE) and starts it in the background if
none answers. Results go to stdout, everything else to stderr. `run` and `exec` pass the command's exit code
on; 124 means that its deadline passed, 128+N that signal N ended it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from tidemill.core.config import read_environment
from tidemill.core.errors import DeadlineError, InputError, SandboxError, SetupError
from tidemill.core.ids import new_id
from tidemill.core.sandbox_api import ExecResult, Sandbox, SandboxInfo
from tidemill.sandbox.backends.registry import make_backend
from tidemill.sandbox.client import LocalSandboxClient
from tidemill.sandbox.starting import ensure_daemon, service_health
from tidemill.sandbox.store.lock import lock_holder

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False,
                  help="Sandboxes: setup, run, create, exec, ls, rm, daemon.")
daemon_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="The service: start, stop, status.")
app.add_typer(daemon_app, name="daemon")

T = TypeVar("T")
EXIT_DEADLINE = 124
_WHOLE_COMMAND = {"allow_interspersed_args": False}
"""Options after the first word of the command belong to the command."""

Template = Annotated[str, typer.Option("--template", "-t", help="Template to start from.")]
BackendName = Annotated[str, typer.Option("--backend", "-b", help="gvisor (default) or unsafe (the host's kernel).")]
Command = Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Program and arguments.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds the command may take.")]
User = Annotated[str, typer.Option("--user", "-u", help="Who runs it inside: user or root.")]
Cwd = Annotated[str, typer.Option("--cwd", "-C", help="Folder inside; default: the user's home.")]
Env = Annotated[list[str] | None, typer.Option("--env", "-e", metavar="NAME=VALUE", help="Variable; may be repeated.")]
Stdin = Annotated[bool, typer.Option("--stdin", "-i", help="Pass standard input on, to its end.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def setup(template: Template = "base") -> None:
    """Fetch the runtime if it is missing, make the template, and start one sandbox from it, which saves the image
    that later ones are restored from. All of it is kept in the cache (TIDEMILL_CACHE)."""
    if os.geteuid() != 0:
        raise SetupError("setting up sandboxes needs root.",
                         remedy="Run it with sudo, or set E2B_API_URL to use a service elsewhere.")
    from tidemill.sandbox.runtime import ensure_runtime
    from tidemill.sandbox.template import ensure_template

    cache_dir = read_environment().cache_dir
    runtime = ensure_runtime(cache_dir)
    _say(f"runtime: {runtime.path} ({runtime.version}) {runtime.notes}".rstrip())
    made = ensure_template(cache_dir, template, progress=_say)
    _say("starting one sandbox from it")
    print(f"template {made.name}: {made.rootfs} ({made.digest}), {_run(_first_start(template, cache_dir))}")


@app.command(context_settings=_WHOLE_COMMAND)
def run(command: Command, template: Template = "base", backend: BackendName = "", timeout: Timeout = 3600.0,
        user: User = "user", cwd: Cwd = "", env: Env = None, stdin: Stdin = False) -> None:
    """Run one command in a new sandbox, and remove the sandbox."""

    async def work() -> int:
        async with _client() as client:
            lease = new_id("cli")
            sandbox = await client.create(template=template, backend=backend, lease=lease, timeout_s=timeout + 60)
            try:
                return await _execute(sandbox, command, timeout, user, cwd, env, stdin)
            finally:
                await client.release_lease(lease)

    raise typer.Exit(_run(work()))


@app.command()
def create(template: Template = "base", backend: BackendName = "",
           timeout: Annotated[float, typer.Option("--timeout", help="Seconds it lives.")] = 3600.0) -> None:
    """Start a sandbox and print its id. It lives until `rm` or its time is over."""

    async def work() -> str:
        async with _client() as client:
            return (await client.create(template=template, backend=backend, timeout_s=timeout)).sandbox_id

    print(_run(work()))


@app.command(name="exec", context_settings=_WHOLE_COMMAND)
def execute(sandbox_id: Annotated[str, typer.Argument(metavar="ID")], command: Command, timeout: Timeout = 3600.0,
            user: User = "user", cwd: Cwd = "", env: Env = None, stdin: Stdin = False) -> None:
    """Run one command in a living sandbox."""
    if command[0] == "--":  # after the id the parser takes it for the first word
        command = command[1:]

    async def work() -> int:
        async with _client() as client:
            sandbox = await client.connect(sandbox_id)
            return await _execute(sandbox, command, timeout, user, cwd, env, stdin)

    raise typer.Exit(_run(work()))


@app.command(name="ls")
def list_sandboxes(lease: Annotated[str, typer.Option("--lease", help="Only those of this lease.")] = "",
                   as_json: AsJson = False) -> None:
    """List living sandboxes."""

    async def work() -> list[SandboxInfo]:
        async with _client() as client:
            return list(await client.list(lease=lease))

    found = _run(work())
    if as_json:
        print(json.dumps([_info_json(i) for i in found], indent=2))
        return
    rows = [("ID", "STATE", "TEMPLATE", "BACKEND", "LEASE", "AGE", "LEFT")]
    now = time.time()
    rows += [(i.sandbox_id, i.state.value, i.template, i.backend, i.lease or "-", _span(now - i.created_at),
              _span(i.expires_at - now)) for i in found]
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


@app.command(name="rm")
def remove(ids: Annotated[list[str] | None, typer.Argument(metavar="ID...")] = None,
           everything: Annotated[bool, typer.Option("--all", help="Every sandbox of the state folder.")] = False,
           lease: Annotated[str, typer.Option("--lease", help="Every sandbox of this lease.")] = "") -> None:
    """Remove sandboxes."""
    if sum((bool(ids), everything, bool(lease))) != 1:
        raise InputError("rm needs ids, --all or --lease, and only one of them.", field="rm")

    async def work() -> int:
        async with _client() as client:
            if lease:
                return await client.release_lease(lease)
            if everything:
                wanted = [client.handle(i.sandbox_id) for i in await client.list()]
            else:
                wanted = [await client.connect(sandbox_id) for sandbox_id in ids or ()]
            await asyncio.gather(*(sandbox.kill() for sandbox in wanted))
            return len(wanted)

    _say(f"removed {_run(work())}")


@daemon_app.command()
def start(on_stop: Annotated[str, typer.Option(help="What a stop does to sandboxes: keep or kill.")] = "keep",
          workers: Annotated[int, typer.Option(help="Starts and forks at once; 0: processors.")] = 0,
          port: Annotated[int, typer.Option(help="Loopback TCP port beside the unix socket.")] = 0,
          api_key_file: Annotated[str, typer.Option(help="File with the key for TCP.")] = "",
          foreground: Annotated[bool, typer.Option(help="Stay in the foreground and log to stderr.")] = False) -> None:
    """Start the service unless one answers."""
    options = ["--on-stop", on_stop, "--workers", str(workers), "--port", str(port)]
    options += ["--api-key-file", api_key_file] if api_key_file else []
    if foreground:
        from tidemill.sandbox.daemon import main

        raise typer.Exit(main(options))
    env = read_environment()
    health = _run(ensure_daemon(env.state_dir, cache_dir=env.cache_dir, options=options))
    print(f"sandbox service {health['version']} with pid {health['pid']} on {env.state_dir}")


@daemon_app.command()
def stop(kill: Annotated[bool, typer.Option("--kill", help="Remove every sandbox first.")] = False,
         wait: Annotated[float, typer.Option(help="Seconds to wait for it.")] = 60.0) -> None:
    """Stop the service in order. By its policy sandboxes go on without it, or end."""
    env = read_environment()
    pid = lock_holder(env.state_dir)
    if pid is None or pid < 0:
        _say(f"no sandbox service on {env.state_dir}")
        return
    if kill:
        remove(ids=None, everything=True, lease="")
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + wait
    while lock_holder(env.state_dir) == pid:
        if time.monotonic() > deadline:
            raise DeadlineError(f"the sandbox service with pid {pid} has not stopped within {wait:g} s.",
                                remedy=f"See {env.state_dir / 'daemon.log'}.")
        time.sleep(0.05)
    _say(f"stopped the sandbox service with pid {pid}")


@daemon_app.command()
def status(as_json: AsJson = False) -> None:
    """Say whether the service runs. Exit code 1 if not."""
    env = read_environment()
    health = _run(service_health(env.state_dir))
    pid = lock_holder(env.state_dir)
    if as_json:
        print(json.dumps({"state_dir": str(env.state_dir), "lock_pid": pid, "service": health}))
    elif health is None:
        print(f"no sandbox service answers on {env.state_dir}" + (f" (pid {pid} holds it)" if pid else ""))
    else:
        print(f"pid {health['pid']}, {health['status']}, {health['sandboxes']} sandboxes, on {env.state_dir}")
    raise typer.Exit(0 if health else 1)


async def _first_start(template: str, cache_dir: Path) -> str:
    """Start, use and end one guest on a state folder of its own; returns what its Python says."""
    with tempfile.TemporaryDirectory(prefix="tidemill-setup-") as folder:
        backend = make_backend("gvisor", state_dir=Path(folder), cache_dir=cache_dir)
        await backend.start()
        try:
            guest = await backend.create("setup", template)
            try:
                done = await guest.exec(["python3", "--version"], stdin=b"", env={}, cwd="", user="user",
                                        timeout_s=30.0, max_output_bytes=1000)
            finally:
                await guest.kill()
        finally:
            await backend.close()
    if done.exit_code != 0:
        raise SandboxError(f"the first sandbox does not work: {done.stderr.decode('utf-8', 'replace')[:300]}")
    return done.text.strip()


async def _execute(sandbox: Sandbox, command: list[str], timeout: float, user: str, cwd: str, env: list[str] | None,
                   stdin: bool) -> int:
    variables = dict(_variable(text) for text in env or ())
    data = sys.stdin.buffer.read() if stdin else b""
    done = await sandbox.exec(command, stdin=data, env=variables, cwd=cwd, user=user, timeout_s=timeout,
                              max_output_bytes=64 << 20)
    return _show(done, timeout)


def _show(done: ExecResult, timeout: float) -> int:
    sys.stdout.buffer.write(done.stdout)
    sys.stdout.buffer.flush()
    sys.stderr.buffer.write(done.stderr)
    sys.stderr.buffer.flush()
    if done.truncated:
        _say("output was cut")
    if done.timed_out:
        _say(f"ended after its {timeout:g} s")
        return EXIT_DEADLINE
    return 128 + done.signal if done.exit_code is None else done.exit_code


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise InputError(f"--env {text!r}: expected NAME=VALUE.", field="env")
    return name, value


@asynccontextmanager
async def _client() -> AsyncIterator[LocalSandboxClient]:
    env = read_environment()
    await ensure_daemon(env.state_dir, cache_dir=env.cache_dir)
    client = LocalSandboxClient(env.state_dir)
    try:
        yield client
    finally:
        await client.close()


def _info_json(info: SandboxInfo) -> dict[str, Any]:
    return {"sandbox_id": info.sandbox_id, "state": info.state.value, "template": info.template,
            "backend": info.backend, "lease": info.lease, "parent_id": info.parent_id, "generation": info.generation,
            "created_at": info.created_at, "expires_at": info.expires_at, "metadata": dict(info.metadata)}


def _span(seconds: float) -> str:
    whole = max(0, round(seconds))
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if whole >= 2 * size:
            return f"{whole // size}{unit}"
    return f"{whole}s"


def _run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _say(text: str) -> None:
    print(text, file=sys.stderr)
