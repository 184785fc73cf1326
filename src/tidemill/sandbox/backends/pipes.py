"""The two named pipes between a guest and whoever serves it. Both sides open them by name, so either may be
replaced.

The guest's descriptors are read-write: it never sees an end of file or a broken pipe while nobody serves it.
Ours are one-way, so that the guest's end is one we see.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tidemill.core.errors import SandboxDiedError, SandboxError

NAMES = ("in.fifo", "out.fifo")


def make_pipes(folder: Path) -> None:
    """Make both in `folder`; only root may open them."""
    for name in NAMES:
        os.mkfifo(folder / name, 0o600)


def open_guest_ends(folder: Path) -> tuple[int, int]:
    """(stdin, stdout) for the guest's first process; the caller closes them after it has started."""
    into = os.open(folder / NAMES[0], os.O_RDWR | os.O_CLOEXEC)
    try:
        return into, os.open(folder / NAMES[1], os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        os.close(into)
        raise


def open_host_ends(folder: Path) -> tuple[int, int]:
    """(write, read) for a Channel, non-blocking. Raises SandboxDiedError if no guest holds the other ends."""
    try:
        into = os.open(folder / NAMES[0], os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        if e.errno in (errno.ENXIO, errno.ENOENT):
            raise SandboxDiedError(f"{folder.name} is gone: nobody reads its pipe.") from e
        raise SandboxError(f"cannot open the pipes of {folder.name}: {e.strerror}") from e
    try:
        return into, os.open(folder / NAMES[1], os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as e:
        os.close(into)
        raise SandboxDiedError(f"{folder.name} is gone: its pipe is missing.") from e
