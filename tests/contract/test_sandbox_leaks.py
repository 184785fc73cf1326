"""Nothing left behind after use, nothing lost after kill -9: the soak's functions with small counts, on real
guests."""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_backends import unavailable

from tidemill.core.config import read_environment
from tidemill.core.launcher import start_time
from tidemill.sandbox.client import LocalSandboxClient
from tidemill.sandbox.starting import ensure_daemon
from tidemill.sandbox.store.lock import lock_holder

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))
soak: Any = importlib.import_module("soak_sandbox")


@pytest.fixture(params=[pytest.param("gvisor", marks=pytest.mark.gvisor), "unsafe"])
def service(request: pytest.FixtureRequest) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """A state folder with a real service; afterwards the service and everything of the folder is gone."""
    if reason := unavailable(request.param):
        pytest.skip(reason)
    folder = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    start = tuple(soak.daemon_command(folder, request.param))
    asyncio.run(ensure_daemon(folder, cache_dir=read_environment().cache_dir, argv=start))
    yield folder, start
    pid = lock_holder(folder)
    assert pid
    os.kill(pid, signal.SIGTERM)
    while start_time(pid) is not None:
        time.sleep(0.02)
    left = soak.leftovers(folder, os.getpid())
    shutil.rmtree(folder)
    assert (left["processes"], left["mounts"]) == (0, 0)


def test_cycles_leave_no_process_mount_descriptor_or_file(service: tuple[Path, tuple[str, ...]]) -> None:
    folder, _ = service

    async def main() -> dict[str, Any]:
        return await soak.cycles(folder, n=6, at_once=2)

    result = asyncio.run(main())
    assert soak.clean(result), result
    for kind in ("processes", "mounts", "fds", "files"):
        worse = result | {"after": result["after"] | {kind: result["before"][kind] + 1}}
        assert not soak.clean(worse)


def test_after_kill_9_of_the_service_every_interpreter_goes_on(service: tuple[Path, tuple[str, ...]]) -> None:
    folder, start = service

    async def main() -> dict[str, Any]:
        client = LocalSandboxClient(folder)
        supported = (await client.capabilities()).survives_daemon
        if not supported:
            await client.close()
            pytest.skip("this backend's guests end with the service")
        result = await soak.readoption(client, folder, start, n=5)
        await client.close()
        return result

    result = asyncio.run(main())
    assert (result["intact"], result["ended"]) == (5, 5)
    assert (result["after"]["processes"], result["after"]["mounts"]) == (0, 0)
