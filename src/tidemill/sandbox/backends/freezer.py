"""Groups of processes that the kernel stops and continues together: the control-group freezer, version 1 or 2.

One group per guest below a folder of this service's own. Limits nothing else. Where no writable freezer is
mounted (many containers), `find_freezer` says so with None and guests cannot be paused.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path

from tidemill.core.errors import DeadlineError, SandboxError

_POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Freezer:
    """`home` is where this service's groups are made; `version` is 1 or 2."""

    home: Path
    version: int

    def members_file(self, name: str) -> Path:
        """Where a process writes 0 to join."""
        return self.home / name / "cgroup.procs"

    def make(self, name: str) -> None:
        """Make a group. Raises SandboxError."""
        try:
            (self.home / name).mkdir(parents=True, exist_ok=True)
        except OSError as e:
            raise SandboxError(f"cannot make the control group {self.home / name}: {e.strerror}") from e

    def frozen(self, name: str) -> bool:
        """Whether the group is (or is being) frozen; False if it does not exist."""
        try:
            if self.version == 1:
                return (self.home / name / "freezer.state").read_text().strip() != "THAWED"
            return (self.home / name / "cgroup.freeze").read_text().strip() == "1"
        except OSError:
            return False

    async def freeze(self, name: str, *, timeout_s: float) -> None:
        """Stop every process of the group and wait until they stand. On an error they run on."""
        self._write(name, freeze=True)
        deadline = time.monotonic() + timeout_s
        try:
            while not self._stands(name):
                if time.monotonic() > deadline:
                    raise DeadlineError(f"{name} did not freeze within {timeout_s:g} s.")
                await asyncio.sleep(_POLL_S)
        except BaseException:
            self._write(name, freeze=False)
            raise

    def thaw(self, name: str) -> None:
        """Let them go on."""
        self._write(name, freeze=False)

    async def remove(self, name: str, *, timeout_s: float) -> None:
        """Remove an empty group; waits for processes that are just ending. Idempotent. Raises SandboxError."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                (self.home / name).rmdir()
                break
            except FileNotFoundError:
                break
            except OSError as e:
                if time.monotonic() > deadline:
                    raise SandboxError(f"the control group {self.home / name} cannot be removed: {e.strerror}") from e
                await asyncio.sleep(_POLL_S)
        if self.home.is_dir() and not any(p.is_dir() for p in self.home.iterdir()):
            try:
                self.home.rmdir()
            except OSError:
                # Another guest has just been given a group here.
                return

    def names(self) -> set[str]:
        """Groups that exist."""
        return {p.name for p in self.home.iterdir() if p.is_dir()} if self.home.is_dir() else set()

    def _stands(self, name: str) -> bool:
        if self.version == 1:
            return (self.home / name / "freezer.state").read_text().strip() == "FROZEN"
        return "frozen 1" in (self.home / name / "cgroup.events").read_text().splitlines()

    def _write(self, name: str, *, freeze: bool) -> None:
        file, text = (
            ("freezer.state", "FROZEN" if freeze else "THAWED")
            if self.version == 1
            else ("cgroup.freeze", "1" if freeze else "0")
        )
        try:
            (self.home / name / file).write_text(text)
        except OSError as e:
            raise SandboxError(f"the control group {self.home / name} cannot be changed: {e.strerror}") from e


def find_freezer(group: str, *, mounts: Path = Path("/proc/self/mounts")) -> Freezer | None:
    """A freezer whose mount we may write; groups are made below `group` in it. None if there is none."""
    for line in mounts.read_text(encoding="utf-8").splitlines():
        _, where, kind, options, *_ = line.split(" ")
        path = Path(where.replace("\\040", " "))
        version = 1 if kind == "cgroup" and "freezer" in options.split(",") else 2 if kind == "cgroup2" else 0
        if not version or "ro" in options.split(",") or not os.access(path, os.W_OK):
            continue
        return Freezer(path / group, version)
    return None
