"""Sandbox soak: nothing is left behind, and nothing is lost when the service is killed.

`make soak ONLY=sandbox` runs 2,000 create-use-reset-kill cycles and one kill -9 of the service under 20 live
interpreters, and writes benchmarks/soak/sandbox.json. The tests run the same functions with small counts.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import conclude, write_soak

from tidemill.core.config import read_environment
from tidemill.core.launcher import start_time
from tidemill.sandbox.client import LocalSandbox, LocalSandboxClient
from tidemill.sandbox.starting import ensure_daemon
from tidemill.sandbox.store.lock import lock_holder

CYCLES, READOPTED, AT_ONCE = 2000, 20, 4
MAX_GROWTH_BYTES = 16 << 20


def leftovers(state_dir: Path, pid: int) -> dict[str, int]:
    """What of a state folder exists on this machine: processes and mounts that name it, descriptors and
    resident memory of its service (`pid`), files in it."""
    name = os.fsencode(state_dir)
    processes = 0
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in (pid, os.getpid()):
            continue
        try:
            processes += name in (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
    mounts = sum(os.fsdecode(name) in line for line in Path("/proc/self/mountinfo").read_text().splitlines())
    rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()
    files = sum(1 for p in state_dir.rglob("*") if not p.name.startswith(("store.sqlite", "daemon.")))
    return {"processes": processes, "mounts": mounts, "fds": len(list(Path(f"/proc/{pid}/fd").iterdir())),
            "files": files, "rss": rss}


async def one_cycle(client: LocalSandboxClient, value: int) -> str:
    """Create, leave traces of every kind, reset, look for them, kill. Returns how the reset was done."""
    sandbox = await client.create(lease="soak")
    session = await sandbox.open_session("python")
    await session.run(f"x = {value}")
    await sandbox.write_file("/tmp/trace", b"1")
    assert (await session.run("print(x)")).text == f"{value}\n"
    how = await sandbox.reset_how()
    fresh = await sandbox.open_session("python")
    assert b"NameError" in (await fresh.run("print(x)")).stderr, "a variable survived the reset"
    assert (await sandbox.exec(["cat", "/tmp/trace"])).exit_code == 1, "a file survived the reset"
    await sandbox.kill()
    return how


async def settled(state_dir: Path, pid: int) -> dict[str, int]:
    """`leftovers` once they have been the same for a second (connections of closed clients take a moment to go)."""
    last, since = leftovers(state_dir, pid), time.monotonic()
    async with asyncio.timeout(30):
        while time.monotonic() - since < 1.0:
            await asyncio.sleep(0.1)
            now = leftovers(state_dir, pid)
            if now | {"rss": 0} != last | {"rss": 0}:
                last, since = now, time.monotonic()
    return last


async def cycles(state_dir: Path, *, n: int, at_once: int) -> dict[str, Any]:
    """n cycles, `at_once` at a time, between two counts of what exists while no client is connected."""
    pid = lock_holder(state_dir) or 0
    hows: list[str] = []
    times: list[float] = []
    started = time.monotonic()

    async def run(count: int) -> None:
        client = LocalSandboxClient(state_dir)
        queue = iter(range(count))

        async def worker() -> None:
            for i in queue:
                began = time.monotonic()
                hows.append(await one_cycle(client, i))
                times.append(time.monotonic() - began)
                if len(hows) % 50 == 0:
                    print(f"{len(hows)} of {n} cycles, {time.monotonic() - started:.0f} s, {leftovers(state_dir, pid)}",
                          file=sys.stderr, flush=True)

        try:
            async with asyncio.TaskGroup() as workers:
                for _ in range(at_once):
                    workers.create_task(worker())
        finally:
            await client.close()

    await run(at_once)  # pools and caches are filled
    before = await settled(state_dir, pid)
    hows.clear()
    times.clear()
    started = time.monotonic()
    await run(n)
    wall_s = time.monotonic() - started
    after = await settled(state_dir, pid)
    client = LocalSandboxClient(state_dir)
    alive = len(await client.list())
    await client.close()
    return {"n": n, "at_once": at_once, "wall_s": round(wall_s, 2),
            "cycle_ms_median": round(statistics.median(times) * 1e3, 1),
            "resets_in_guest": hows.count("in_guest"), "resets_replaced": hows.count("replaced"), "before": before,
            "after": after, "alive": alive}


def clean(found: dict[str, Any]) -> bool:
    """Whether `cycles` left nothing: the memory of the service may grow by what its tables hold, not by the cycle."""
    before, after = found["before"], found["after"]
    left = {what for what in ("processes", "mounts", "fds", "files") if after[what] > before[what]}
    return not left and found["alive"] == 0 and after["rss"] - before["rss"] < MAX_GROWTH_BYTES


async def readoption(client: LocalSandboxClient, state_dir: Path, start: Sequence[str] | None, *,
                     n: int) -> dict[str, Any]:
    """Kill -9 the service under n sandboxes with a live interpreter each, a quarter of them paused; a new one
    finds all."""
    sandboxes: list[LocalSandbox] = [await client.create(lease="soak") for _ in range(n)]
    sessions = [await s.open_session("python") for s in sandboxes]
    await asyncio.gather(*(session.run(f"x = {i}") for i, session in enumerate(sessions)))
    paused = sandboxes[:: 4]
    await asyncio.gather(*(s.pause() for s in paused))
    pid = (await client.health())["pid"]
    os.kill(pid, signal.SIGKILL)
    while start_time(pid) is not None:
        await asyncio.sleep(0.005)
    began = time.monotonic()
    await ensure_daemon(state_dir, cache_dir=read_environment().cache_dir, argv=start)
    took_s = time.monotonic() - began
    await asyncio.gather(*(s.resume() for s in paused))
    intact = 0
    for i, session in enumerate(sessions):
        intact += (await session.run("print(x)")).text == f"{i}\n"
    reset = [await s.reset_how() for s in sandboxes[:2]]
    ended = await client.release_lease("soak")
    return {"n": n, "intact": intact, "ready_again_s": round(took_s, 2), "resets_after": reset, "ended": ended,
            "after": leftovers(state_dir, (await client.health())["pid"])}


def daemon_command(state_dir: Path, backend: str) -> Sequence[str]:
    """Starts a service on `state_dir` in the background."""
    return (sys.executable, "-m", "tidemill.sandbox.daemon", "--state", str(state_dir), "--cache",
            str(read_environment().cache_dir), "--backend", backend, "--detach")


def main(*, backend: str = "gvisor", n: int = CYCLES, readopted: int = READOPTED, at_once: int = AT_ONCE) -> None:
    """The full counts on a state folder of its own; writes the result and says whether it is clean."""
    state_dir = Path(tempfile.mkdtemp(prefix="tm-soak-", dir="/tmp"))
    start = daemon_command(state_dir, backend)

    async def work() -> dict[str, Any]:
        await ensure_daemon(state_dir, cache_dir=read_environment().cache_dir, argv=start)
        client = LocalSandboxClient(state_dir)
        try:
            return {"readoption": await readoption(client, state_dir, start, n=readopted),
                    "cycles": await cycles(state_dir, n=n, at_once=at_once)}
        finally:
            await client.release_lease("soak")
            await client.close()

    began = time.time()
    try:
        result: dict[str, Any] = {"backend": backend, **asyncio.run(work())}
    finally:
        pid = lock_holder(state_dir)
        if pid:
            os.kill(pid, signal.SIGTERM)
            while start_time(pid) is not None:
                time.sleep(0.05)
    shutil.rmtree(state_dir)
    result["met"] = clean(result["cycles"]) and result["readoption"]["intact"] == readopted
    path = write_soak("sandbox", n, result, started=began)
    conclude(f"sandbox: {json.dumps(result)}", path, met=result["met"])


if __name__ == "__main__":
    main()
