"""The service as a process: starting, racing, stopping, being killed, owners that die. The guests are fake
and live inside the service, so those of a killed service are dead to the next one."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tidemill.core.errors import BusyError, ConfigError, NotFoundError, SandboxDiedError, SandboxError, SetupError
from tidemill.core.launcher import start_time
from tidemill.sandbox.client import LocalSandboxClient
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.service import running_service
from tidemill.sandbox.starting import ensure_daemon, service_health
from tidemill.sandbox.store.lock import lock_holder

FAKE = """
import sys
from tidemill.sandbox import daemon
from tidemill.sandbox.backends.fake import FakeBackend
daemon.make_backend = lambda name, *, state_dir, cache_dir: FakeBackend()
daemon.NAMES = ("fake",)
sys.exit(daemon.main(sys.argv[1:]))
"""


def command(state_dir: Path, *options: str) -> Sequence[str]:
    return (sys.executable, "-c", FAKE, "--state", str(state_dir), "--cache", str(state_dir), "--backend", "fake",
            "--detach", *options)


async def wait_gone(pid: int) -> None:
    async with asyncio.timeout(20):
        while start_time(pid) is not None:
            await asyncio.sleep(0.02)


@pytest.fixture
def folder(state_dir: Path) -> Iterator[Path]:
    """A state folder whose service is gone afterwards."""
    yield state_dir
    pid = lock_holder(state_dir)
    if pid:
        os.kill(pid, signal.SIGKILL)
        while start_time(pid) is not None:
            time.sleep(0.01)


def test_racing_starters_get_one_service(folder: Path) -> None:
    async def main() -> None:
        assert await service_health(folder) is None
        healths = await asyncio.gather(
            *(ensure_daemon(folder, cache_dir=folder, argv=command(folder)) for _ in range(4)))
        assert {h["pid"] for h in healths} == {lock_holder(folder)}
        again = await ensure_daemon(folder, cache_dir=folder, argv=("/bin/false",))
        assert again["pid"] == healths[0]["pid"]

    asyncio.run(main())


def test_a_second_service_is_refused_by_pid(folder: Path) -> None:
    async def main() -> None:
        health = await ensure_daemon(folder, cache_dir=folder, argv=command(folder))
        second = subprocess.run(command(folder), capture_output=True, text=True, timeout=30)
        assert second.returncode == 3
        assert f"in use by the sandbox service with pid {health['pid']}" in second.stderr
        with pytest.raises(BusyError, match=str(health["pid"])):
            async with running_service(ServiceConfig(state_dir=folder, cache_dir=folder), []):
                raise AssertionError("two services on one folder")
        assert (await service_health(folder)) is not None

    asyncio.run(main())


@pytest.mark.parametrize("policy", ["keep", "kill"])
def test_stopping_in_order_leaves_only_the_store_and_the_log(folder: Path, policy: str) -> None:
    async def main() -> None:
        health = await ensure_daemon(folder, cache_dir=folder, argv=command(folder, "--on-stop", policy))
        client = LocalSandboxClient(folder)
        sandbox = await client.create()
        os.kill(health["pid"], signal.SIGTERM)
        await wait_gone(health["pid"])
        with pytest.raises(SandboxError):
            await sandbox.exec(["true"])
        assert sorted(p.name for p in folder.iterdir()) == ["daemon.lock", "daemon.log", "store.sqlite"]
        assert lock_holder(folder) is None
        log = (folder / "daemon.log").read_text()
        assert ("leaving 1 sandboxes running" if policy == "keep" else "ended 1 of 1 sandboxes") in log
        # The same client goes on with the next service.
        await ensure_daemon(folder, cache_dir=folder, argv=command(folder))
        reason = "killed" if policy == "kill" else "not alive"
        with pytest.raises(SandboxDiedError, match="the service was stopped" if policy == "kill" else reason):
            await sandbox.info()
        assert (await client.health())["generation"] == 2
        await client.close()

    asyncio.run(main())


def test_after_kill_9_the_next_service_knows_everything(folder: Path) -> None:
    async def main() -> None:
        health = await ensure_daemon(folder, cache_dir=folder, argv=command(folder))
        client = LocalSandboxClient(folder)
        made = await client.create_many(3, lease="run")
        os.kill(health["pid"], signal.SIGKILL)
        await wait_gone(health["pid"])
        assert (folder / "daemon.sock").exists()
        await ensure_daemon(folder, cache_dir=folder, argv=command(folder))
        assert await client.list() == []
        for sandbox in made:
            with pytest.raises(SandboxDiedError, match="not alive when the service started"):
                await sandbox.exec(["true"])  # type: ignore[union-attr]
        leases = await client.call("GET", "/x/v1/leases")
        assert [(row["lease"], row["ownerPid"]) for row in leases] == [("run", os.getpid())]
        await client.close()

    asyncio.run(main())


def test_sandboxes_of_an_owner_that_is_killed_are_reaped_and_no_others(folder: Path) -> None:
    owner_code = """
import asyncio, sys
from pathlib import Path
from tidemill.sandbox.client import LocalSandboxClient
async def main():
    client = LocalSandboxClient(Path(sys.argv[1]))
    await client.create_many(2, lease="doomed")
    print("ready", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""

    async def main() -> None:
        await ensure_daemon(folder, cache_dir=folder, argv=command(folder, "--lease-grace", "0.2"))
        client = LocalSandboxClient(folder)
        mine, free = await client.create(lease="mine"), await client.create()
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", owner_code, str(folder),
                                                     stdout=asyncio.subprocess.PIPE)
        assert owner.stdout
        assert await owner.stdout.readline() == b"ready\n"
        assert len(await client.list(lease="doomed")) == 2
        owner.kill()
        await owner.wait()
        async with asyncio.timeout(20):
            while await client.list(lease="doomed"):
                await asyncio.sleep(0.05)
        assert {i.sandbox_id for i in await client.list()} == {mine.sandbox_id, free.sandbox_id}
        events = (await client.call("GET", "/x/v1/events"))["events"]
        assert [e["detail"] for e in events if e["lease"] == "doomed" and e["kind"] == "killed"] == [
            f"lease doomed lost: its owner, process {owner.pid}, is gone or silent"] * 2
        with pytest.raises(NotFoundError):
            await client.heartbeat("doomed")
        await client.close()

    asyncio.run(main())


def test_time_runs_out(folder: Path) -> None:
    async def main() -> None:
        await ensure_daemon(folder, cache_dir=folder, argv=command(folder))
        client = LocalSandboxClient(folder)
        short, longer = await client.create(timeout_s=0.2), await client.create()
        async with asyncio.timeout(20):
            while len(await client.list()) == 2:
                await asyncio.sleep(0.05)
        with pytest.raises(SandboxDiedError, match="expired"):
            await short.exec(["true"])
        await longer.set_timeout(0.1)
        async with asyncio.timeout(20):
            while await client.list():
                await asyncio.sleep(0.05)
        await client.close()

    asyncio.run(main())


def test_a_start_that_fails_says_why(folder: Path) -> None:
    async def main() -> None:
        with pytest.raises(SetupError, match="port = 99999"):
            await ensure_daemon(folder, cache_dir=folder, argv=command(folder, "--port", "99999"))
        with pytest.raises(SetupError, match="api_key"):
            await ensure_daemon(folder, cache_dir=folder, argv=command(folder, "--port", "9999"))
        with pytest.raises(ConfigError, match="short enough"):
            await ensure_daemon(Path("/tmp") / ("x" * 100), cache_dir=folder)
        blocked = folder / "file"
        blocked.write_text("")
        with pytest.raises(SetupError, match="file"):
            await ensure_daemon(blocked, cache_dir=folder, argv=command(blocked))
        assert lock_holder(folder) is None

    asyncio.run(main())
