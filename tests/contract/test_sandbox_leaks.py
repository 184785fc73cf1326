"""Nothing left behind after use, nothing lost after kill -9: the soak's functions with small counts, on real
guests."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from real_backends import unavailable

from tidemill.core.config import read_environment
from tidemill.core.launcher import start_time
from tidemill.sandbox.client import LocalSandboxClient
from tidemill.sandbox.starting import ensure_daemon
from tidemill.sandbox.store.lock import lock_holder


def load_soak() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "soak_sandbox.py"
    spec = importlib.util.spec_from_file_location("soak_sandbox", path)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_sandbox"] = module
    spec.loader.exec_module(module)
    return module


soak: Any = load_soak()


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
    assert result["alive"] == 0
    for kind in ("processes", "mounts", "fds", "files"):
        assert result["after"][kind] <= result["before"][kind], result


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
