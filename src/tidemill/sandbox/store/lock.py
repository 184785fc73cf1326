"""One service per state folder: an advisory lock held for the life of the process, with the holder's pid
inside the file.

The kernel drops the lock when the holder dies, however it dies, so a stale file never blocks the next start.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from types import TracebackType

from tidemill.core.errors import BusyError, SetupError

_GLANCE_S = 0.5


class StateLock:
    """Exclusive hold on `folder`; a context manager. Raises BusyError naming the pid that holds it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "daemon.lock"
        self._fd: int | None = None

    def acquire(self) -> None:
        """Take the lock or raise BusyError, after half a second at most."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as e:
            raise SetupError(f"cannot open {self._path}: {e.strerror}",
                             remedy="Choose a state folder you may write to.") from e
        deadline = time.monotonic() + _GLANCE_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as e:
                # No pid in a locked file means that somebody only looks (lock_holder) or has just begun: look again.
                holder = os.pread(fd, 32, 0).decode("ascii", "replace").strip()
                if not holder and time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                os.close(fd)
                raise BusyError(
                    f"{self._path.parent} is in use by the sandbox service with pid {holder or 'unknown'}.",
                    remedy="Talk to that service, or stop it with `tidemill sandbox daemon stop`.") from e
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        self._fd = fd

    def release(self) -> None:
        """Give it back; idempotent. The file stays, so that no two starters ever lock different inodes."""
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> StateLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.release()


def lock_holder(folder: Path) -> int | None:
    """Pid of the process that holds the lock of `folder`, None if nobody does."""
    try:
        fd = os.open(folder / "daemon.lock", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.read(fd, 32).decode("ascii", "replace").strip()
        return int(text) if text.isdigit() else -1
    finally:
        os.close(fd)
    return None
