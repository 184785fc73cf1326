"""The runtime's control socket: JSON calls with descriptors beside them, as the pinned runsc builds speak it.

One call costs a fraction of a millisecond where the command line costs a process start. The format is private
to the runtime, so whoever uses this keeps the command line as the other way: ProtocolError says that this way
does not work with this build.
"""

from __future__ import annotations

import array
import asyncio
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.core.errors import DeadlineError, SandboxDiedError, SandboxError

_MAX_ANSWER = 1 << 20


class ProtocolError(SandboxError):
    """The runtime does not speak the format this module knows."""


async def call(path: Path, method: str, argument: Any, *, fds: Sequence[int] = (), timeout_s: float) -> Any:
    """Call `method` and return its result.

    `fds` stay open here. Raises SandboxDiedError if nobody listens, SandboxError with the runtime's words if
    it refuses, DeadlineError, ProtocolError.
    """
    loop = asyncio.get_running_loop()
    # The path may be longer than a socket address holds: go through the folder's descriptor.
    try:
        folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as e:
        raise SandboxDiedError(f"{path.parent} is gone ({e.strerror}).") from e
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as s:
            s.setblocking(False)
            async with asyncio.timeout(timeout_s):
                await loop.sock_connect(s, f"/proc/self/fd/{folder}/{path.name}")
                await _send(loop, s, json.dumps({"method": method, "arg": argument}).encode(), fds)
                return _result(method, await _receive(loop, s))
    except TimeoutError as e:
        raise DeadlineError(f"the runtime did not answer {method} within {timeout_s:g} s.") from e
    except OSError as e:
        raise SandboxDiedError(f"nobody answers at {path.name} ({e.strerror or e}).") from e
    finally:
        os.close(folder)


async def _send(loop: asyncio.AbstractEventLoop, s: socket.socket, body: bytes, fds: Sequence[int]) -> None:
    control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    # A fresh socket's buffer takes a request whole; what it did not take goes without the descriptors.
    sent = s.sendmsg([body], control)
    if sent < len(body):
        await loop.sock_sendall(s, body[sent:])


async def _receive(loop: asyncio.AbstractEventLoop, s: socket.socket) -> Any:
    data = b""
    while len(data) < _MAX_ANSWER:
        part = await loop.sock_recv(s, 65_536)
        data += part
        try:
            return json.loads(data)
        except ValueError as e:
            if not part:
                raise ProtocolError(f"the runtime's answer is not JSON: {data[:80]!r}") from e
    raise ProtocolError("the runtime's answer does not end.")


def _result(method: str, answer: Any) -> Any:
    if not isinstance(answer, dict) or not isinstance(answer.get("success"), bool):
        raise ProtocolError(f"the runtime answered {method} with {str(answer)[:80]!r}.")
    if not answer["success"]:
        message = str(answer.get("err", ""))
        if "unknown method" in message or "unmarshal" in message:
            raise ProtocolError(f"the runtime does not know {method}: {message}")
        raise SandboxError(f"the runtime refused {method}: {message}")
    return answer.get("result")
