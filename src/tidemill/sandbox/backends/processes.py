"""Processes that are not our children: found by what their command line says, ended through descriptors that
cannot name another."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from tidemill.core.errors import SandboxError


def command_line(pid: int) -> list[str]:
    """Arguments of a process; empty if it is gone, a zombie, or a kernel thread."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
    except OSError:
        return []


def find_processes(matches: Callable[[list[str]], bool]) -> list[int]:
    """Pids whose command line matches."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and matches(command_line(int(name)))]


async def end_processes(
    pids: Iterable[int], matches: Callable[[list[str]], bool], *, timeout_s: float
) -> None:
    """SIGKILL those that still match and wait until they have ended. Raises SandboxError if one does not."""
    loop = asyncio.get_running_loop()
    fds: list[int] = []
    try:
        for pid in pids:
            try:
                fd = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            fds.append(fd)
            # Looked at after opening: the descriptor and the command line are of the same process.
            if matches(command_line(pid)):
                try:
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                    continue
                except ProcessLookupError:
                    pass
            fds.remove(fd)
            os.close(fd)
        deadline = time.monotonic() + timeout_s
        for fd in fds:
            await _ended(loop, fd, deadline - time.monotonic())
    finally:
        for fd in fds:
            os.close(fd)


async def _ended(loop: asyncio.AbstractEventLoop, pidfd: int, timeout_s: float) -> None:
    done = asyncio.Event()
    loop.add_reader(pidfd, done.set)
    try:
        async with asyncio.timeout(max(0.01, timeout_s)):
            await done.wait()
    except TimeoutError as e:
        raise SandboxError("a process of the sandbox did not end although it was killed.") from e
    finally:
        loop.remove_reader(pidfd)
