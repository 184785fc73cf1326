"""Runs the guest agent on this machine without a sandbox (`--plain`), on named pipes as a backend would."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

from tidemill.core.config import read_environment
from tidemill.sandbox.backends.channel import Channel
from tidemill.sandbox.backends.guest import AgentGuest, GuestLimits
from tidemill.sandbox.guest.binary import agent_binary, zygote_script
from tidemill.sandbox.guest.protocol import PADDING, Decoder, Frame, Tag, Type, encode_fields, encode_frame

IDENTITY = b"0123456789abcdef"
PATIENCE_S = 20.0
"""How long a test waits for what must come before it fails."""


@cache
def binary() -> Path:
    return agent_binary(read_environment().cache_dir)


class AgentProcess:
    """An agent and its two pipes; a context manager."""

    def __init__(self, *, zygote: bool = False, program: Path | None = None, user: int | None = None) -> None:
        self.folder = Path(mkdtemp(prefix="tm-agent-"))
        self.folder.chmod(0o711)
        self.pipes = [self.folder / "in", self.folder / "out"]
        argv = [str(program or binary()), "--plain"]
        if zygote:
            argv += ["--zygote", str(zygote_script()), "--python", sys.executable]
        for pipe in self.pipes:
            os.mkfifo(pipe)
        ends = [os.open(pipe, os.O_RDWR) for pipe in self.pipes]
        try:
            self.process = subprocess.Popen(
                argv, stdin=ends[0], stdout=ends[1], stderr=subprocess.PIPE, user=user, cwd="/", start_new_session=True
            )
        finally:
            for end in ends:
                os.close(end)

    def __enter__(self) -> AgentProcess:
        return self

    def __exit__(self, *exc: object) -> None:
        # Outside a sandbox nothing ends the commands of a killed agent but we.
        started = descendants(self.process.pid)
        self.process.kill()
        self.process.wait()
        for pid in started:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        assert self.process.stderr is not None
        self.process.stderr.close()
        for path in sorted(self.folder.iterdir()):
            path.unlink()
        self.folder.rmdir()

    def open(self) -> tuple[int, int]:
        """Descriptors to write to and read from it; non-blocking, opened anew."""
        return (
            os.open(self.pipes[0], os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC),
            os.open(self.pipes[1], os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC),
        )


class RawHost:
    """A host that sees every frame and does nothing by itself: no acknowledgement, no credit."""

    def __init__(self, agent: AgentProcess, identity: bytes = IDENTITY) -> None:
        self.identity = identity
        self._agent = agent
        self._write, self._read = agent.open()
        self._decoder = Decoder()
        self._waiting: list[Frame] = []
        self._seq = 0
        self.ack = 0

    def close(self) -> None:
        """What a killed host leaves: nothing is said."""
        os.close(self._write)
        os.close(self._read)

    def __enter__(self) -> RawHost:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def write(self, data: bytes) -> None:
        """Raw bytes into the agent's stdin."""
        view = memoryview(data)
        deadline = time.monotonic() + PATIENCE_S
        while view:
            assert time.monotonic() < deadline, "the agent does not read"
            assert self._agent.process.poll() is None, "the agent has ended"
            select.select([], [self._write], [], 0.5)
            try:
                view = view[os.write(self._write, view) :]
            except BlockingIOError:
                continue

    def send(
        self,
        kind: int,
        stream: int,
        fields: Sequence[tuple[int, int | bytes | str]] = (),
        *,
        payload: bytes = b"",
        flags: int = 0,
    ) -> bytes:
        """One frame; returns it."""
        self._seq += 1
        frame = encode_frame(kind, stream, payload or encode_fields(fields), seq=self._seq, ack=self.ack, flags=flags)
        self.write(frame)
        return frame

    def hello(self, *, last_seen: int = 0, generation: int = 0, abandon: int = 0, takeover: bool = False) -> Frame:
        """Greet; frames replayed before the answer stay to be received."""
        if takeover:
            self.write(PADDING)
        self._seq = 0
        self.send(
            Type.HELLO,
            7,
            [
                (Tag.IDENTITY, self.identity),
                (Tag.LAST_SEEN, last_seen),
                (Tag.GENERATION, generation),
                (Tag.ABANDON, abandon),
            ],
        )
        return self.until(lambda frame: frame.type == Type.WELCOME)

    def exec(self, stream: int, argv: Iterable[str], *more: tuple[int, int | bytes | str]) -> None:
        """Start a command."""
        self.send(Type.EXEC, stream, [*((Tag.ARGV, word) for word in argv), (Tag.ENV, "PATH=/usr/bin:/bin"), *more])

    def frames(self, wait_s: float) -> list[Frame]:
        """What is there after at most `wait_s`; [] if nothing came."""
        if self._waiting:
            taken, self._waiting = self._waiting, []
            return taken
        deadline = time.monotonic() + wait_s
        while select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))[0]:
            if frames := self._decoder.feed(os.read(self._read, 1 << 20)):
                return frames
        return []

    def read_bytes(self, count: int) -> bytes:
        """At most `count` raw bytes off the pipe, past the decoder: they are lost to it."""
        select.select([self._read], [], [], PATIENCE_S)
        return os.read(self._read, count)

    def until(self, wanted: Callable[[Frame], bool], seen: list[Frame] | None = None) -> Frame:
        """The first frame that is wanted; those before it go to `seen`, or back into the queue without it."""
        deadline = time.monotonic() + PATIENCE_S
        passed: list[Frame] = []
        while True:
            new = self.frames(0.5)
            for i, frame in enumerate(new):
                if wanted(frame):
                    self._waiting = [*([] if seen is not None else passed), *new[i + 1 :]]
                    return frame
                (passed if seen is None else seen).append(frame)
            assert self._agent.process.poll() is None, "the agent has ended"
            assert time.monotonic() < deadline, f"not received; got {passed or seen}"

    def result(self, stream: int) -> tuple[bytes, Frame]:
        """stdout and the last frame of a stream."""
        seen: list[Frame] = []
        end = self.until(lambda f: f.stream == stream and f.type in (Type.RESULT, Type.ERROR), seen)
        return b"".join(f.payload for f in seen if f.stream == stream and f.type == Type.STDOUT), end


def with_guest(body: Callable[[AgentGuest], Awaitable[None]], *, zygote: bool = False) -> None:
    """Run `body` with a guest on a fresh agent."""

    async def main() -> None:
        with AgentProcess(zygote=zygote) as agent:
            guest = AgentGuest(
                "g",
                Channel(*agent.open(), label="g", identity=IDENTITY),
                limits=GuestLimits(nproc=0, address_space=0, nofile=0),
            )
            try:
                await guest.channel.hello()
                await asyncio.wait_for(body(guest), 60)
            finally:
                await guest.detach()

    asyncio.run(main())


def descendants(pid: int) -> list[int]:
    """Children of a process, theirs, and so on."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(FileNotFoundError, ProcessLookupError):
            parents.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found, todo = [], [pid]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return found


def process_lives(pid: int) -> bool:
    """Whether a process exists and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid: int) -> bool:
    """Wait for a process to end; False if it does not."""
    deadline = time.monotonic() + PATIENCE_S
    while process_lives(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not process_lives(pid)
