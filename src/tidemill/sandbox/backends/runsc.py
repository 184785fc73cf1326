"""gVisor's runtime as calls with deadlines: start, restore, save, freeze, and end without it.

Freezing and saving go over the control socket, or over the command line if this build's socket speaks another
format (said once). Ending never asks the runtime: its processes are killed and its files removed, which works
in any condition.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from tidemill.core.errors import DeadlineError, SandboxError
from tidemill.sandbox.backends.control_socket import ProtocolError, call
from tidemill.sandbox.backends.processes import command_line, end_processes, find_processes
from tidemill.sandbox.runtime import Runtime

log = logging.getLogger(__name__)

START_S = 60.0
FREEZE_S = 20.0
SAVE_S = 120.0
END_S = 20.0
IMAGE_FILES = ("checkpoint.img", "pages_meta.img", "pages.img")
_SAVE_ARGUMENT = {
    "key": None,
    "metadata": {"compression": "none"},
    "have_pages_file": True,
    "Resume": True,
    "MemoryFileSaveOpts": {"ExcludeCommittedZeroPages": False},
}


class Runsc:
    """One state folder of the runtime. A container's bundle is `bundles / id`, which also tells its processes
    from others'."""

    def __init__(self, runtime: Runtime, root: Path, bundles: Path) -> None:
        self.runtime = runtime
        self.root = root
        self.bundles = bundles
        self._socket_works = True
        self._cut_short: set[str] = set()

    def flags(self) -> list[str]:
        """Global flags; part of what a saved image depends on."""
        return [
            "--platform=systrap",
            "--network=none",
            "--overlay2=root:memory",
            "--directfs=false",
            "--ignore-cgroups",
        ]

    async def start(self, container: str, stdin: int, stdout: int) -> None:
        """Start the bundle's first process with these descriptors."""
        await self._command(
            "run",
            "-detach",
            "-bundle",
            self.bundles / container,
            container,
            container=container,
            stdio=(stdin, stdout),
            timeout_s=START_S,
        )

    async def restore(self, container: str, image: Path, stdin: int, stdout: int) -> None:
        """Start from a saved image instead."""
        await self._command(
            "restore",
            "-detach",
            "-bundle",
            self.bundles / container,
            "-image-path",
            image,
            container,
            container=container,
            stdio=(stdin, stdout),
            timeout_s=START_S,
        )

    async def pause(self, container: str) -> None:
        """Freeze every task."""
        await self._control(container, "containerManager.Pause", "pause")

    async def resume(self, container: str) -> None:
        """Let them go on."""
        await self._control(container, "containerManager.Resume", "resume")

    async def save(self, container: str, image: Path) -> None:
        """Save into the empty folder `image`; the container goes on."""
        if self._socket_works:
            fds = [
                os.open(image / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                for name in IMAGE_FILES
            ]
            try:
                await call(
                    self._socket(container),
                    "containerManager.Checkpoint",
                    _SAVE_ARGUMENT,
                    fds=fds,
                    timeout_s=SAVE_S,
                )
                return
            except ProtocolError as e:
                self._give_up_socket(e)
            finally:
                for fd in fds:
                    os.close(fd)
            for name in IMAGE_FILES:
                (image / name).unlink(missing_ok=True)
        await self._command(
            "checkpoint",
            "-leave-running",
            "-compression",
            "none",
            "-image-path",
            image,
            container,
            container=container,
            timeout_s=SAVE_S,
        )

    async def end(self, container: str) -> None:
        """Kill everything of the container and remove the runtime's files about it; idempotent."""

        def belongs(arguments: list[str]) -> bool:
            return bool(arguments) and self._marks(arguments, container)

        # A command in the middle of a start may add a process while we look: look again until there is none.
        deadline = time.monotonic() + END_S
        while pids := find_processes(belongs):
            if (left := deadline - time.monotonic()) <= 0:
                raise SandboxError(
                    f"{container} still has {len(pids)} processes after {END_S:g} s of killing them."
                )
            await end_processes(pids, belongs, timeout_s=left)
            if container in self._cut_short:
                # A child of the killed command may have been between fork and exec, where it has no command
                # line.
                await asyncio.sleep(0.1)
        self._cut_short.discard(container)
        for path in [*self.root.glob(f"{container}_sandbox:*"), self.root / f"runsc-{container}.sock"]:
            path.unlink(missing_ok=True)

    def alive(self, container: str) -> bool:
        """Whether its kernel process runs."""
        pid = ((self.state(container) or {}).get("sandbox") or {}).get("pid", 0)
        return bool(pid) and self._marks(command_line(int(pid)), container)

    def containers(self) -> set[str]:
        """Names the runtime has files about."""
        return {path.name.partition("_sandbox:")[0] for path in self.root.glob("*_sandbox:*.state")}

    # ---- inside

    def _marks(self, arguments: list[str], container: str) -> bool:
        bundle = str(self.bundles / container)
        return f"--bundle={bundle}" in arguments or any(
            pair == ("-bundle", bundle) for pair in pairwise(arguments)
        )

    def state(self, container: str) -> dict[str, Any] | None:
        """The runtime's own record, None if there is none."""
        for path in self.root.glob(f"{container}_sandbox:*.state"):
            try:
                return dict(json.loads(path.read_text(encoding="utf-8")))
            except (OSError, ValueError):
                return None
        return None

    def _socket(self, container: str) -> Path:
        state = self.state(container) or {}
        return Path(
            (state.get("sandbox") or {}).get("controlSocketPath") or self.root / f"runsc-{container}.sock"
        )

    async def _control(self, container: str, method: str, verb: str) -> None:
        if self._socket_works:
            try:
                await call(self._socket(container), method, None, timeout_s=FREEZE_S)
                return
            except ProtocolError as e:
                self._give_up_socket(e)
        await self._command(verb, container, container=container, timeout_s=FREEZE_S)

    def _give_up_socket(self, error: ProtocolError) -> None:
        log.warning(
            "the control socket of runsc %d is of another kind (%s): its command line is used instead, which is slower",
            self.runtime.version,
            error.message,
        )
        self._socket_works = False

    async def _command(
        self, *arguments: str | Path, container: str, timeout_s: float, stdio: tuple[int, int] | None = None
    ) -> None:
        """Run one command to its end. Raises SandboxError with the runtime's words, DeadlineError. Its
        descriptor 2 is the guest's too, so it is never a file of ours."""
        said = self.bundles / container / "runsc.log"
        said.unlink(missing_ok=True)
        command = [
            self.runtime.path,
            f"--root={self.root}",
            f"--log={said}",
            "--log-format=json",
            *self.flags(),
            *arguments,
        ]
        stdin, stdout = stdio or (asyncio.subprocess.DEVNULL, asyncio.subprocess.DEVNULL)
        process = await asyncio.create_subprocess_exec(
            *(str(c) for c in command),
            stdin=stdin,
            stdout=stdout,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        waiting = asyncio.ensure_future(
            self._wait(process, container, f"{arguments[0]} {container}", timeout_s)
        )
        try:
            code = await asyncio.shield(waiting)
        except asyncio.CancelledError:
            # A command killed in the middle of a start may leave a child that no scan of processes sees yet:
            # let it end.
            await asyncio.wait([waiting])
            raise
        if code:
            raise SandboxError(
                f"runsc {arguments[0]} {container} failed: {_last_words(said) or f'exit code {code}'}"
            )

    async def _wait(
        self, process: asyncio.subprocess.Process, container: str, what: str, timeout_s: float
    ) -> int:
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait()
        except TimeoutError as e:
            process.kill()
            await process.wait()
            self._cut_short.add(container)
            raise DeadlineError(f"runsc {what} did not end within {timeout_s:g} s.") from e


def _last_words(path: Path) -> str:
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    words: Sequence[str] = [line for line in lines if line.strip()]
    if not words:
        return ""
    try:
        return str(json.loads(words[-1]).get("msg", words[-1]))[:500]
    except ValueError:
        return words[-1][:500]
