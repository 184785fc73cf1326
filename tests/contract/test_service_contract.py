"""What the sandbox service promises its clients, over HTTP, for every backend."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from real_backends import unavailable

from tidemill.core.config import read_environment
from tidemill.core.errors import (
    BusyError,
    InputError,
    MissingCapabilityError,
    NotFoundError,
    SandboxDiedError,
    TidemillError,
)
from tidemill.core.sandbox_api import SandboxState
from tidemill.sandbox.backends.base import Backend
from tidemill.sandbox.backends.fake import FakeBackend
from tidemill.sandbox.backends.registry import make_backend
from tidemill.sandbox.client import LocalSandbox, LocalSandboxClient
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.service import running_service

Body = Callable[[LocalSandboxClient], Awaitable[None]]


@pytest.fixture
def state_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=[
    "fake",
    "unsafe",
    pytest.param("gvisor", marks=pytest.mark.gvisor),
])
def run(request: pytest.FixtureRequest, state_dir: Path) -> Callable[[Body], None]:
    """Run an async test body with a client of a fresh service; everything must be gone afterwards."""
    name = str(request.param)
    if reason := name != "fake" and unavailable(name):
        pytest.skip(reason)

    def backend() -> Backend:
        if name == "fake":
            return FakeBackend()
        return make_backend(name, state_dir=state_dir, cache_dir=read_environment().cache_dir)

    @asynccontextmanager
    async def service() -> AsyncIterator[LocalSandboxClient]:
        config = ServiceConfig(state_dir=state_dir, cache_dir=read_environment().cache_dir, backend=name,
                               keep_on_stop=False)
        async with running_service(config, [backend()]) as orchestrator:
            client = LocalSandboxClient(state_dir)
            try:
                yield client
            finally:
                await client.close()
                assert all(not e.lock.locked() for e in orchestrator.entries.values())

    def runner(body: Body) -> None:
        async def main() -> None:
            async with service() as client:
                await body(client)

        asyncio.run(main())

    return runner


def test_a_command_and_its_results(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        sandbox = await client.create(metadata={"k": "v ü"})
        info = await sandbox.info()
        assert (info.state, info.template, info.metadata, info.parent_id, info.generation) == (
            SandboxState.RUNNING, "base", {"k": "v ü"}, "", 0)
        assert 3590 < info.expires_at - info.created_at < 3700
        done = await sandbox.exec(["echo", "hello", "wörld"])
        assert (done.exit_code, done.stdout) == (0, "hello wörld\n".encode())
        assert not done.timed_out
        assert not done.truncated
        assert done.text == "hello wörld\n"
        assert (await sandbox.exec(["false"])).exit_code == 1
        assert (await sandbox.exec(["sh", "-c", "exit 7"])).exit_code == 7
        assert (await sandbox.exec(["cat"], stdin=b"\x00\xff raw")).stdout == b"\x00\xff raw"
        assert b"COLOUR=blue" in (await sandbox.exec(["env"], env={"COLOUR": "blue"})).stdout
        assert (await sandbox.exec(["whoami"])).stdout == b"user\n"
        assert (await sandbox.exec(["pwd"], cwd="/tmp")).stdout == b"/tmp\n"
        assert (await sandbox.exec(["cat", "/no/such/file"])).exit_code == 1
        with pytest.raises(InputError, match="no-such-program"):
            await sandbox.exec(["no-such-program"])

    run(body)


def test_deadlines_and_output_limits_are_results(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        sandbox = await client.create()
        late = await sandbox.exec(["sleep", "60"], timeout_s=0.2)
        assert (late.exit_code, late.timed_out) == (None, True)
        flood = await sandbox.exec(["yes"], timeout_s=1.0, max_output_bytes=1000)
        assert flood.truncated
        assert flood.stdout == b"y\n" * 500
        assert (await sandbox.exec(["echo", "still here"])).stdout == b"still here\n"

    run(body)


def test_sessions_remember_and_end(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        sandbox = await client.create()
        python, shell = await sandbox.open_session("python"), await sandbox.open_session("sh")
        assert (python.kind, shell.kind) == ("python", "sh")
        assert (await python.run("x = 40")).stdout == b""
        assert (await python.run("print(x + 2)")).stdout == b"42\n"
        bad = await python.run("print(unknown)")
        assert b"NameError" in bad.stderr
        assert bad.exit_code != 0
        assert (await python.run("print(x)")).stdout == b"40\n"
        await shell.run("COLOUR=blue")
        assert (await shell.run("echo $COLOUR")).stdout == b"blue\n"
        assert {s.session_id for s in await sandbox.sessions()} == {python.session_id, shell.session_id}
        late = await shell.run("sleep 60", timeout_s=0.3)
        assert late.timed_out
        with pytest.raises(NotFoundError, match="session"):
            await shell.run("echo again")
        assert (await python.run("print(x)")).stdout == b"40\n"
        await python.close()
        await python.close()
        with pytest.raises(NotFoundError):
            await python.run("1")
        assert await sandbox.sessions() == []

    run(body)


def test_files_are_bytes(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        sandbox = await client.create()
        data = bytes(range(256)) * 4096
        path = "/home/user/a folder/ü&?.bin"
        await sandbox.write_file(path, data)
        assert await sandbox.read_file(path) == data
        assert (await sandbox.exec(["cat", path], max_output_bytes=1 << 21)).stdout == data
        await sandbox.write_file(path, b"")
        assert await sandbox.read_file(path) == b""
        with pytest.raises(NotFoundError):
            await sandbox.read_file("/home/user/none")
        await sandbox.write_file(path, b"x" * 100)
        with pytest.raises(InputError):
            await sandbox.read_file(path, max_bytes=99)

    run(body)


def test_pause_freezes_and_resume_goes_on(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        if not (await client.capabilities()).pause:
            sandbox = await client.create()
            with pytest.raises(MissingCapabilityError):
                await sandbox.pause()
            return
        sandbox = await client.create()
        session = await sandbox.open_session("python")
        await session.run("x = 1")
        await sandbox.pause()
        assert (await sandbox.info()).state is SandboxState.PAUSED
        with pytest.raises(BusyError, match="paused"):
            await sandbox.exec(["true"])
        with pytest.raises(BusyError, match="already paused"):
            await sandbox.pause()
        with pytest.raises(BusyError, match="Resume"):
            await sandbox.reset()
        await sandbox.resume()
        with pytest.raises(BusyError, match="already running"):
            await sandbox.resume()
        assert (await session.run("print(x)")).stdout == b"1\n"
        await sandbox.pause()
        await sandbox.kill()

    run(body)


def test_forks_go_on_from_the_same_state_and_are_independent(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        sandbox = await client.create(metadata={"who": "source"})
        if not (await client.capabilities()).fork:
            with pytest.raises(MissingCapabilityError):
                await sandbox.fork(2)
            return
        session = await sandbox.open_session("python")
        await session.run("x = 1")
        await sandbox.write_file("/home/user/f", b"before")
        children = await sandbox.fork(2)
        assert len({c.sandbox_id for c in [sandbox, *children]}) == 3
        await session.run("x = 2")
        await sandbox.write_file("/home/user/f", b"after")
        for n, child in enumerate(children):
            info = await child.info()
            assert (info.parent_id, info.metadata) == (sandbox.sandbox_id, {"who": "source"})
            (inherited,) = await child.sessions()
            assert (await inherited.run("print(x)")).stdout == b"1\n"
            await inherited.run(f"x = 10 + {n}")
            assert await child.read_file("/home/user/f") == b"before"
        (grandchild,) = await children[1].fork()
        (inherited,) = await grandchild.sessions()
        assert (await inherited.run("print(x)")).stdout == b"11\n"
        assert (await session.run("print(x)")).stdout == b"2\n"
        await sandbox.kill()
        assert (await children[0].exec(["echo", "alive"])).stdout == b"alive\n"

    run(body)


def test_reset_leaves_nothing_of_earlier_use(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        sandbox = await client.create()
        for _ in range(2):
            session = await sandbox.open_session("python")
            await session.run("x = 1")
            await sandbox.write_file("/home/user/secret", b"1")
            await sandbox.write_file("/tmp/secret", b"1")
            assert await sandbox.reset_how() in ("in_guest", "replaced")
            with pytest.raises(NotFoundError):
                await session.run("x")
            for path in ("/home/user/secret", "/tmp/secret"):
                with pytest.raises(NotFoundError):
                    await sandbox.read_file(path)
            fresh = await sandbox.open_session("python")
            assert b"NameError" in (await fresh.run("print(x)")).stderr
        assert (await sandbox.info()).state is SandboxState.RUNNING

    run(body)


def test_kill_is_final_and_idempotent(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        sandbox = await client.create()
        waiting = asyncio.create_task(sandbox.exec(["sleep", "60"], timeout_s=60))
        await asyncio.sleep(0.2)
        await sandbox.kill()
        with pytest.raises(SandboxDiedError):
            await waiting
        await sandbox.kill()
        for call in (sandbox.exec(["true"]), sandbox.info(), sandbox.reset(), sandbox.read_file("/x"),
                     sandbox.open_session()):
            with pytest.raises(SandboxDiedError, match="killed"):
                await call
        assert await client.list() == []

    run(body)


def test_a_batch_lists_filters_and_ends_with_its_lease(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        made = await client.create_many(3, lease="run/1", metadata={"g": "a"})
        mine = [m for m in made if isinstance(m, LocalSandbox)]
        assert len(mine) == 3
        other = await client.create()
        outs = await asyncio.gather(*(m.exec(["echo", m.sandbox_id]) for m in mine))
        assert [o.text.strip() for o in outs] == [m.sandbox_id for m in mine]
        assert {i.sandbox_id for i in await client.list(lease="run/1")} == {m.sandbox_id for m in mine}
        assert len(await client.list()) == 4
        assert await client.release_lease("run/1") == 3
        assert [i.sandbox_id for i in await client.list()] == [other.sandbox_id]
        assert await client.release_lease("run/1") == 0

    run(body)


def test_a_cancelled_command_is_ended_and_the_sandbox_usable(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        sandbox = await client.create()
        session = await sandbox.open_session("sh")
        for call in (sandbox.exec(["sleep", "987"], timeout_s=1000), session.run("sleep 987", timeout_s=1000)):
            task = asyncio.create_task(call)
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert (await sandbox.exec(["echo", "ok"])).stdout == b"ok\n"
        async with asyncio.timeout(10):
            while await sandbox.sessions():
                await asyncio.sleep(0.02)
        with pytest.raises(NotFoundError):
            await session.run("echo again")

    run(body)


def test_a_cancelled_create_leaves_nothing(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        for delay in (0.0, 0.005, 0.05):
            task = asyncio.create_task(client.create())
            await asyncio.sleep(delay)
            task.cancel()
            try:
                sandbox = await task
            except asyncio.CancelledError:
                continue
            await sandbox.kill()
        async with asyncio.timeout(20):
            while await client.list() or client.undoing:
                await asyncio.sleep(0.02)

    run(body)


def test_unknown_names_are_errors(run: Callable[[Body], None]) -> None:
    async def body(client: LocalSandboxClient) -> None:
        calls: list[tuple[Awaitable[object], type[TidemillError]]] = [
            (client.create(template="none"), NotFoundError), (client.create(backend="none"), NotFoundError),
            (client.connect("sbx-none"), NotFoundError), (client.connect("../etc"), NotFoundError),
            (client.capabilities_of("none"), NotFoundError), (client.create(timeout_s=-1), InputError),
            (client.create_many(0), InputError), (client.create_many(100_000), InputError),
            (client.create(metadata={"a": "x" * 9000}), InputError)]
        for call, kind in calls:
            with pytest.raises(kind):
                await call
        assert await client.list() == []

    run(body)
