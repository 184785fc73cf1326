"""The engine in a process of its own, behind a unix socket, and the client that starts it.

The parent listens in a private folder, starts `python -m tidemill.engine.process`, and the child connects: its first
reply is EngineInfo, or the error that kept it from starting. The child ends when the socket closes, so it cannot
outlive its parent (which the launcher also makes sure of). Both ends read and write in threads of their own; the
child's main thread does nothing but the engine's loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from tidemill.core.config import parse_config, to_plain
from tidemill.core.engine_api import EngineInfo
from tidemill.core.errors import EngineError, TidemillError
from tidemill.core.launcher import Launcher
from tidemill.engine import messages as m
from tidemill.engine import wire
from tidemill.engine.client import InboxClient, run_core
from tidemill.engine.load import EngineSpec, load_core, use_threads

_LOG_TAIL = 2000
_START_CALL = 0


class FrameSocket:
    """Frames over a connected socket: blocking reads in the caller's thread, writes queued to a thread."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._file = sock.makefile("rb")
        self._out: queue.SimpleQueue[tuple[bytes, bytes] | None] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="tidemill-frames", daemon=True)
        self._writer.start()

    def send(self, header: bytes, payload: bytes) -> None:
        """Queue a frame. If the peer is gone it is dropped: the reading side notices the end."""
        self._out.put((header, payload))

    def read(self) -> tuple[bytes, bytes] | None:
        """Next frame, None at the end of the stream (a reset counts as the end)."""
        try:
            return wire.read_frame(self._file.read)
        except (ConnectionError, ValueError):  # ValueError: the file was closed by our own side
            return None

    def close(self) -> None:
        """Flush what is queued (for at most 5 s, in case the peer hangs) and close both directions. Idempotent."""
        self._out.put(None)
        self._writer.join(5.0)
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._file.close()  # waits for a reader, which the shutdown has woken
        self._sock.close()

    def _write(self) -> None:
        while (item := self._out.get()) is not None:
            try:
                wire.send_frame(self._sock, *item)
            except OSError:
                return


class SpawnedEngine(InboxClient):
    """An engine process started by this one. Close it, or use it as an async context manager.

    Start it from a thread that lives as long as the engine should: on Linux a child's parent is the thread that made
    it.
    """

    def __init__(self, spec: EngineSpec, launcher: Launcher) -> None:
        """Starts the process and waits until it serves. Raises what kept it from starting."""
        super().__init__()
        self._folder = Path(tempfile.mkdtemp(prefix="tidemill-engine-"))
        self._log = self._folder / "engine.log"
        self._frames: FrameSocket | None = None
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                path = self._folder / "socket"
                listener.bind(str(path))
                listener.listen(1)
                listener.settimeout(0.1)
                argv = [sys.executable, "-m", "tidemill.engine.process", str(path), json.dumps(to_plain(spec))]
                self._process = launcher.start("engine", argv, log=self._log)
                self._frames = FrameSocket(self._accept(listener))
            self.started_as = self._first_reply()
        except BaseException:
            self._stop()
            raise
        self._reader = threading.Thread(target=self._read, name="tidemill-replies", daemon=True)
        self._reader.start()

    async def __aenter__(self) -> SpawnedEngine:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def close(self) -> None:
        await asyncio.to_thread(self.shutdown)

    def shutdown(self) -> None:
        """`close` for synchronous callers: end the process and wait for it. Open calls raise EngineError."""
        self._fail_all(EngineError("the engine was closed"))
        self._stop()
        if threading.current_thread() is not self._reader:
            self._reader.join()

    @property
    def pid(self) -> int:
        """Process id of the engine."""
        return self._process.pid

    def _post(self, message: m.Message) -> None:
        assert self._frames is not None
        self._frames.send(*wire.encode_message(message))

    def _accept(self, listener: socket.socket) -> socket.socket:
        while True:
            try:
                return listener.accept()[0]
            except TimeoutError:
                if self._process.poll() is not None:
                    raise EngineError(self._last_words()) from None

    def _first_reply(self) -> EngineInfo:
        assert self._frames is not None
        received = self._frames.read()
        if received is None:
            raise EngineError(self._last_words())
        reply = wire.decode_reply(received[0])
        if isinstance(reply, m.Failure):
            raise reply.error
        assert isinstance(reply, m.Result)
        assert isinstance(reply.value, EngineInfo)
        return reply.value

    def _read(self) -> None:
        assert self._frames is not None
        try:
            while (received := self._frames.read()) is not None:
                self._deliver([wire.decode_reply(received[0])])
        finally:
            self._fail_all(EngineError(self._last_words()))

    def _last_words(self) -> str:
        """Why the process ended, as far as it said."""
        code = self._process.poll()
        try:
            tail = self._log.read_text("utf-8", "replace")[-_LOG_TAIL:].strip()
        except OSError:
            tail = ""
        how = "closed its socket" if code is None else f"ended with exit code {code}"
        return f"the engine process {how}" + (f"; its last output:\n{tail}" if tail else "")

    def _stop(self) -> None:
        if self._frames is not None:
            self._frames.close()
        if hasattr(self, "_process"):
            self._process.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def main(argv: Sequence[str]) -> int:
    """Entry point of the child: `SOCKET SPEC_JSON`. Serves the one connection until it closes."""
    path, spec_json = argv
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.connect(path)
    frames = FrameSocket(sock)
    try:
        spec = parse_config(EngineSpec, json.loads(spec_json), source="engine spec")
        use_threads(spec.threads)
        core = load_core(spec)
    except TidemillError as e:
        frames.send(*wire.encode_reply(m.Failure(_START_CALL, e)))
        frames.close()
        return 1
    frames.send(*wire.encode_reply(m.Result(_START_CALL, core.info())))
    inbox: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()

    def read() -> None:
        try:
            while (received := frames.read()) is not None:
                inbox.put(wire.decode_message(*received))
        finally:
            inbox.put(None)

    def deliver(replies: Sequence[m.Reply]) -> None:
        for reply in replies:
            frames.send(*wire.encode_reply(reply))

    threading.Thread(target=read, name="tidemill-inbox", daemon=True).start()
    run_core(core, inbox, deliver)
    frames.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
