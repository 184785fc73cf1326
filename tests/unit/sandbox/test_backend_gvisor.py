"""What only whole-state backends can do, on real gVisor guests; and what they do when something of theirs is broken."""

from __future__ import annotations

import asyncio
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

import pytest

from tidemill.core.config import read_environment
from tidemill.core.errors import SandboxError, SetupError
from tidemill.sandbox.backends.base import GuestSession
from tidemill.sandbox.backends.gvisor import GvisorBackend, GvisorGuest
from tidemill.sandbox.backends.processes import find_processes
from tidemill.sandbox.snapshots.images import ImageStore

pytestmark = pytest.mark.gvisor
CACHE = read_environment().cache_dir
Body = Callable[[GvisorBackend], Awaitable[None]]


@cache
def unavailable() -> str:
    """Why this machine cannot run the backend, or empty."""

    async def start(folder: Path) -> str:
        backend = GvisorBackend(state_dir=folder, cache_dir=CACHE)
        try:
            await backend.start()
            return "" if "base" in await backend.templates() else "template base is not built: tidemill sandbox setup"
        except SetupError as e:
            return str(e)

    with tempfile.TemporaryDirectory(prefix="tm-") as folder:
        return asyncio.run(start(Path(folder)))


@pytest.fixture
def play() -> Iterator[Callable[[Body], None]]:
    """Run a body with a started backend; nothing of its state folder may be left after it was reaped."""
    if reason := unavailable():
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="tm-"))

    def player(body: Body) -> None:
        async def main() -> None:
            backend = GvisorBackend(state_dir=folder, cache_dir=CACHE)
            await backend.start()
            try:
                await asyncio.wait_for(body(backend), 100)
            finally:
                await backend.reap(())
                await backend.close()

        asyncio.run(main())

    yield player
    left = [str(p) for p in folder.rglob("*") if not p.is_dir()]
    left += [str(pid) for pid in find_processes(lambda arguments: any(str(folder) in a for a in arguments))]
    guests = list((folder / "gvisor" / "guests").iterdir())
    shutil.rmtree(folder)
    assert (left, guests) == ([], [])


async def cell(session: GuestSession, code: str) -> str:
    result = await session.run(code, timeout_s=30.0, max_output_bytes=10_000)
    assert result.exit_code == 0, result
    return result.text


SET_UP = """
import os, random, socket, subprocess, tempfile, threading, time
x = 40
data = open("/tmp/data", "w+"); data.write("0123456789"); data.flush(); data.seek(4)
gone = tempfile.TemporaryFile(); gone.write(b"unlinked"); gone.seek(2)
echo = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname())
peer, _ = server.accept()
unread = client.send(b"in flight ")
ticks = []
threading.Thread(target=lambda: [ticks.append(time.sleep(0.01)) for _ in range(100_000)], daemon=True).start()
pid = os.getpid()
"""
CHECK = """
x += 1
before = len(ticks)
echo.stdin.write(b"ping %d\\n" % x); echo.stdin.flush()
client.sendall(b"and new")
got = b""
while len(got) < 17:
    got += peer.recv(17 - len(got))
client.sendall(b"in flight ")
time.sleep(0.1)
print(x, data.read(2), gone.read(1), echo.stdout.readline(), got, os.getpid() == pid, len(ticks) > before)
"""


def test_a_running_interpreter_goes_on_in_two_forks_and_a_second_generation(
    play: Callable[[Body], None],
) -> None:
    async def body(backend: GvisorBackend) -> None:
        guest = await backend.create("a", "base")
        session = await guest.open_session("python")
        await cell(session, SET_UP)
        forks = await guest.fork(["b", "c"])
        copies = [f for f in forks if isinstance(f, GvisorGuest)]
        assert len(copies) == 2, forks
        first = "41 45 b'l' b'ping 41\\n' b'in flight and new' True True\n"
        sessions = [await copy.attach_session(session.record()) for copy in copies]
        for one in (session, *sessions):
            # Each starts from the same state: none sees what another did.
            assert await cell(one, CHECK) == first
        (grandchild,) = await copies[0].fork(["d"])
        assert isinstance(grandchild, GvisorGuest), grandchild
        assert (copies[0].generation, grandchild.generation) == (1, 2)
        again = await grandchild.attach_session(session.record())
        second = "42 67 b'i' b'ping 42\\n' b'in flight and new' True True\n"
        assert await cell(again, CHECK) == second
        assert await cell(sessions[0], CHECK) == second
        drawn = {await cell(one, "(random.random(), os.urandom(8))") for one in (session, *sessions, again)}
        assert len(drawn) == 4

    play(body)


def test_shell_state_is_copied_and_a_cell_in_flight_answers_only_its_owner(play: Callable[[Body], None]) -> None:
    async def body(backend: GvisorBackend) -> None:
        guest = await backend.create("a", "base")
        shell, busy = await guest.open_session("sh"), await guest.open_session("python")
        await cell(shell, "cd /var/tmp; word=it\\'s; f() { echo $word $PWD; }")
        running = asyncio.ensure_future(cell(busy, "import time; time.sleep(1); print('done')"))
        await asyncio.sleep(0.1)
        (copy,) = await guest.fork(["b"])
        assert isinstance(copy, GvisorGuest), copy
        twin = await copy.attach_session(shell.record())
        assert await cell(twin, "f; word=other; f") == "it's /var/tmp\nother /var/tmp\n"
        assert await cell(shell, "f") == "it's /var/tmp\n"
        assert len({await cell(s, "echo $RANDOM$RANDOM$RANDOM") for s in (shell, twin)}) == 2
        assert await running == "done\n"
        orphan = await copy.attach_session(busy.record())
        async with asyncio.timeout(30):
            while any(entry.busy for entry in await copy.channel.list_sessions()):
                await asyncio.sleep(0.05)
        assert await cell(orphan, "1") == "1\n"

    play(body)


def test_one_name_that_is_taken_fails_alone(play: Callable[[Body], None]) -> None:
    async def body(backend: GvisorBackend) -> None:
        guest = await backend.create("a", "base")
        await backend.create("b", "base")
        taken, good = await guest.fork(["b", "c"])
        assert isinstance(taken, SandboxError)
        assert "b exists" in str(taken)
        assert isinstance(good, GvisorGuest)
        await good.hello()

    play(body)


@pytest.mark.parametrize("after_s", [0.0, 0.05, 0.2, 0.4])
def test_a_cancelled_fork_leaves_the_source_running_and_nothing_else(
    play: Callable[[Body], None], after_s: float
) -> None:
    async def body(backend: GvisorBackend) -> None:
        guest = await backend.create("a", "base")
        session = await guest.open_session("python")
        task = asyncio.ensure_future(guest.fork(["b", "c"]))
        await asyncio.sleep(after_s)
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert await cell(session, "6 * 7") == "42\n"
        if task.cancelled():
            assert await backend.reap(["a"]) == []

    play(body)


def test_without_the_control_socket_the_command_line_does_the_same(
    play: Callable[[Body], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from tidemill.sandbox.backends import runsc
    from tidemill.sandbox.backends.control_socket import ProtocolError

    async def other_format(*_: object, **__: object) -> None:
        raise ProtocolError("the runtime does not know containerManager.Pause")

    monkeypatch.setattr(runsc, "call", other_format)

    async def body(backend: GvisorBackend) -> None:
        guest = await backend.create("a", "base")
        session = await guest.open_session("sh")
        await cell(session, "x=1")
        await guest.pause()
        await guest.hello()
        await guest.resume()
        (copy,) = await guest.fork(["b"])
        assert isinstance(copy, GvisorGuest), copy
        assert await cell(await copy.attach_session(session.record()), "echo $x") == "1\n"
        await guest.kill()

    with caplog.at_level(logging.WARNING):
        play(body)
    assert sum("command line is used instead" in r.message for r in caplog.records) == 1


def test_a_template_image_that_cannot_be_restored_is_saved_anew_once(
    play: Callable[[Body], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    async def body(backend: GvisorBackend) -> None:
        # The backend's own image store, in a folder of this test.
        backend._images = ImageStore(tmp_path)
        await (await backend.create("a", "base")).kill()
        (image,) = (p for p in tmp_path.iterdir() if p.is_dir())
        for name in ("checkpoint.img", "pages_meta.img"):
            (image / name).write_bytes(b"broken" * 100)
        guest = await backend.create("b", "base")
        await guest.hello()
        await guest.kill()
        (await backend.create("c", "base")).channel.close()

    with caplog.at_level(logging.WARNING):
        play(body)
    assert sum("saved anew" in r.message for r in caplog.records) == 1
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".build")] == []


def test_a_frozen_guest_cannot_miss_its_deadline(play: Callable[[Body], None]) -> None:
    async def body(backend: GvisorBackend) -> None:
        guest = await backend.create("a", "base")
        session = await guest.open_session("python")
        await cell(session, "import time")
        running = asyncio.ensure_future(session.run("time.sleep(0.8); 'slept'", timeout_s=1.6, max_output_bytes=99))
        await asyncio.sleep(0.3)
        await guest.pause()
        await asyncio.sleep(2.0)
        await guest.resume()
        assert (await running).text == "'slept'\n"

    play(body)
