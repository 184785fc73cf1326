"""Calls over a runtime's control socket, against a server that answers as told."""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import DeadlineError, SandboxDiedError, SandboxError
from tidemill.sandbox.backends.control_socket import ProtocolError, call

Answer = Callable[[socket.socket, dict[str, Any], list[int]], None]


async def ask(answer: Answer, *, timeout_s: float = 5.0, fds: tuple[int, ...] = (), argument: Any = None) -> Any:
    """One call to a server in a thread; its socket has a path longer than a socket address."""
    with tempfile.TemporaryDirectory() as folder:
        deep = Path(folder) / ("d" * 100)
        deep.mkdir()
        here = os.open(deep, os.O_PATH)
        server = socket.socket(socket.AF_UNIX)
        server.bind(f"/proc/self/fd/{here}/s.sock")
        server.listen()

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                text, received = b"", array.array("i")
                while True:
                    data, extra, _, _ = connection.recvmsg(65_536, 1024)
                    text += data
                    for _, _, body in extra:
                        received.frombytes(body)
                    try:
                        request = json.loads(text)
                        break
                    except ValueError:
                        continue
                try:
                    answer(connection, request, list(received))
                finally:
                    for fd in received:
                        os.close(fd)

        serving = asyncio.get_running_loop().run_in_executor(None, serve)
        try:
            return await call(deep / "s.sock", "m", argument, fds=fds, timeout_s=timeout_s)
        finally:
            await serving
            server.close()
            os.close(here)


def test_an_answer_in_pieces_is_put_together_and_descriptors_arrive() -> None:
    def answer(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
        assert request == {"method": "m", "arg": {"big": "x" * 300_000}}
        os.write(fds[0], b"hi")
        for part in (b'{"success":true,"err":"",', b'"result":{"n":', b"7}}"):
            connection.sendall(part)

    read, write = os.pipe()
    with os.fdopen(read, "rb") as reader, os.fdopen(write, "wb") as writer:
        got = asyncio.run(ask(answer, fds=(writer.fileno(),), argument={"big": "x" * 300_000}))
        assert got == {"n": 7}
        assert reader.read(2) == b"hi"


@pytest.mark.parametrize(
    ("said", "error"),
    [
        (b'{"success":false,"err":"no such container"}', SandboxError),
        (b'{"success":false,"err":"unknown method"}', ProtocolError),
        (b"hello", ProtocolError),
        (b"[1]", ProtocolError),
        (b"", ProtocolError),
    ],
)
def test_refusals_and_other_formats_are_told_apart(said: bytes, error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        asyncio.run(ask(lambda connection, request, fds: connection.sendall(said)))
    assert type(caught.value) is error


def test_a_silent_runtime_meets_the_deadline() -> None:
    def answer(connection: socket.socket, request: dict[str, Any], fds: list[int]) -> None:
        assert connection.recv(1) == b""

    with pytest.raises(DeadlineError, match=r"0\.05 s"):
        asyncio.run(ask(answer, timeout_s=0.05))


def test_nobody_there_is_a_dead_sandbox(tmp_path: Path) -> None:
    for path in (tmp_path / "none.sock", tmp_path / "nofolder" / "x.sock"):
        with pytest.raises(SandboxDiedError):
            asyncio.run(call(path, "m", None, timeout_s=1))
