"""The control-group freezer: which mount is taken, and real processes standing still and going on."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from tidemill.core.errors import SandboxError
from tidemill.sandbox.backends.freezer import Freezer, find_freezer


def test_the_first_writable_freezer_is_taken(tmp_path: Path) -> None:
    for name in ("one", "two", "a b"):
        (tmp_path / name).mkdir()
    mounts = tmp_path / "mounts"

    def found(*lines: str) -> Freezer | None:
        mounts.write_text("".join(f"{line} 0 0\n" for line in ("proc /proc proc rw", *lines)))
        return find_freezer("ours", mounts=mounts)

    assert found() is None
    assert found(f"cgroup {tmp_path}/one cgroup rw,memory") is None
    assert found(f"cgroup {tmp_path}/one cgroup ro,freezer") is None
    assert found(f"cgroup {tmp_path}/missing cgroup rw,freezer") is None
    assert found(f"cgroup {tmp_path}/one cgroup rw,freezer") == Freezer(tmp_path / "one/ours", 1)
    assert found(f"cgroup2 {tmp_path}/a\\040b cgroup2 rw,nosuid") == Freezer(tmp_path / "a b/ours", 2)
    both = (f"c {tmp_path}/one cgroup ro,freezer", f"cgroup2 {tmp_path}/two cgroup2 rw")
    assert found(*both) == Freezer(tmp_path / "two/ours", 2)


def test_a_group_that_is_not_there_is_not_frozen_and_cannot_be_changed(tmp_path: Path) -> None:
    freezer = Freezer(tmp_path / "ours", 2)
    assert not freezer.frozen("none")
    assert freezer.names() == set()
    with pytest.raises(SandboxError, match="none"):
        freezer.thaw("none")
    asyncio.run(freezer.remove("none", timeout_s=1))


@pytest.mark.parametrize("version", [1, 2])
def test_processes_stand_still_and_go_on(version: int, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root")
    mounts = tmp_path / "mounts"
    kind = {1: "cgroup", 2: "cgroup2"}[version]
    lines = Path("/proc/self/mounts").read_text().splitlines(keepends=True)
    mounts.write_text("".join(line for line in lines if line.split()[2] == kind))
    freezer = find_freezer(f"tidemill-test-{os.getpid()}", mounts=mounts)
    if freezer is None:
        pytest.skip(f"no writable control-group freezer of version {version} is mounted")
    freezer.make("g")
    counter = subprocess.Popen(["sh", "-c", "while :; do echo; sleep 0.01; done"], stdout=subprocess.PIPE)
    try:
        assert counter.stdout is not None
        os.set_blocking(counter.stdout.fileno(), False)
        freezer.members_file("g").write_text(str(counter.pid))
        assert not freezer.frozen("g")
        asyncio.run(freezer.freeze("g", timeout_s=10))
        assert freezer.frozen("g")
        counter.stdout.read()
        time.sleep(0.2)
        assert counter.stdout.read() is None
        freezer.thaw("g")
        assert not freezer.frozen("g")
        deadline = time.monotonic() + 10
        while not counter.stdout.read():
            assert time.monotonic() < deadline, "it does not go on"
            time.sleep(0.01)
        assert freezer.names() == {"g"}
    finally:
        counter.kill()
        counter.communicate()
        asyncio.run(freezer.remove("g", timeout_s=10))
    assert not freezer.home.exists()
