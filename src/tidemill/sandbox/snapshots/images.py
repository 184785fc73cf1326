"""Folders of saved guests that appear whole or not at all, under the digest of everything they depend on.

Knows neither runtimes nor templates: a key is any JSON-able value, and whoever saves fills the folder it is
given.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tidemill.core.digests import PREFIX, digest_json
from tidemill.core.errors import DeadlineError
from tidemill.core.files import sync_dir, write_json

_MARK = "snapshot.json"
_LOCK_S = 180.0


class ImageStore:
    """Images of one cache folder, shared between processes. `name` is for people; `key` decides."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, name: str, key: Any) -> Path:
        """Where the image lies or would lie."""
        return self.folder / f"{name}-{digest_json(key).removeprefix(PREFIX)[:16]}"

    def find(self, name: str, key: Any) -> Path | None:
        """The finished image, if there is one."""
        path = self.path(name, key)
        return path if (path / _MARK).is_file() else None

    @asynccontextmanager
    async def building(self, name: str, key: Any) -> AsyncIterator[Path]:
        """An empty folder to fill; put in place on success, removed on failure.

        To be used inside `exclusive`, after another `find`: a process before us may have built it.
        """
        scratch = Path(tempfile.mkdtemp(dir=self.folder, prefix=".build-"))
        try:
            yield scratch
            self._publish(scratch, name, key)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """No other process builds here meanwhile. Raises DeadlineError if one does for too long."""
        self.folder.mkdir(parents=True, exist_ok=True)
        fd = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            await self._lock(fd)
            for left in self.folder.glob(".build-*"):
                shutil.rmtree(left, ignore_errors=True)
            yield
        finally:
            os.close(fd)

    async def _lock(self, fd: int) -> None:
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise DeadlineError(
                        f"another process has been saving a template in {self.folder} for {_LOCK_S:g} s."
                    ) from None
            await asyncio.sleep(0.05)

    def _publish(self, scratch: Path, name: str, key: Any) -> None:
        write_json(scratch / _MARK, {"name": name, "key": key})
        scratch.rename(self.path(name, key))
        sync_dir(self.folder)

    def remove(self, name: str, key: Any) -> None:
        """Delete an image that turned out not to be usable."""
        shutil.rmtree(self.path(name, key), ignore_errors=True)
