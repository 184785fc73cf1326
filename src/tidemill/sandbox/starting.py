"""`ensure_daemon`: a service that answers on a state folder, started in the background if there is none.

Any number of processes may ask at once; the lock of the state folder decides which of the services they start
stays, and all wait for that one.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tidemill.core.errors import DeadlineError, SandboxError, SetupError
from tidemill.sandbox.client import LocalSandboxClient
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.daemon import EXIT_BUSY
from tidemill.sandbox.store.lock import lock_holder

_POLL_S = 0.05


async def ensure_daemon(state_dir: Path, *, cache_dir: Path, options: Sequence[str] = (),
                        argv: Sequence[str] | None = None, timeout_s: float = 90.0) -> dict[str, Any]:
    """Health of the service on `state_dir`, started if need be.

    options  further arguments for a service that has to be started; one that runs keeps its own
    argv     the command that starts a service in the background, instead of this package's own
    Raises SetupError with what the starting service said, DeadlineError if none answers within `timeout_s` (a
    service that has to find many sandboxes again takes its time).
    """
    config = ServiceConfig(state_dir=state_dir, cache_dir=cache_dir)
    deadline = time.monotonic() + timeout_s
    started = False
    while True:
        health = await service_health(state_dir)
        if health is not None and health["status"] == "ok":
            return health
        if time.monotonic() > deadline:
            raise DeadlineError(f"no sandbox service answered on {state_dir} within {timeout_s:g} s.",
                                remedy=f"See {config.log}.")
        if not started or lock_holder(state_dir) is None:
            started = True
            command = argv or (sys.executable, "-m", "tidemill.sandbox.daemon", "--state", str(state_dir),
                               "--cache", str(cache_dir), "--detach", *options)
            await _start(command)
        await asyncio.sleep(_POLL_S)


async def service_health(state_dir: Path) -> dict[str, Any] | None:
    """Health of the service on `state_dir`, None if none answers."""
    client = LocalSandboxClient(state_dir)
    try:
        return await client.health()
    except SandboxError:
        return None
    finally:
        await client.close()


async def _start(command: Sequence[str]) -> None:
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE)
    _, said = await process.communicate()
    if process.returncode not in (0, EXIT_BUSY):
        message = said.decode("utf-8", "replace").strip().removeprefix("error: ")
        raise SetupError(f"the sandbox service could not start: {message or f'exit code {process.returncode}'}")
