"""Finds the gVisor runtime (`runsc`): the one on PATH if it is new enough, else the pinned Debian package in
our cache.

Older builds are refused because they hang in checkpoint. The package is fetched with the machine's own apt
mirror and keys under a private configuration, its SHA-256 checked, and unpacked into the cache; the system's
package sources stay as they were. Starts nothing that outlives the call.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tidemill.core.digests import PREFIX, digest_file
from tidemill.core.errors import IntegrityError, SetupError
from tidemill.sandbox import apt

MIN_VERSION = 20240729
"""Release date of the oldest build whose checkpoint and control socket work as we use them."""
PINNED_SUITE = "bookworm-backports"
PINNED_PACKAGE = "runsc=0.0~20240729.0-4~bpo12+2"
PINNED_SHA256 = "afdde883e3876ea807e19c708d4432674a20cb10186a7a5b554d62f38ea8de46"
_REMEDY = "Run `tidemill sandbox setup`, or put runsc of 2024-07-29 or newer on PATH."


@dataclass(frozen=True, slots=True)
class Runtime:
    """A usable runsc. `version` is its release date as a number (20240729); `notes` says what was passed over
    and why."""

    path: Path
    version: int
    notes: str = ""


def read_version(path: Path, *, timeout_s: float = 20.0) -> int:
    """Release date printed by `runsc --version`. Raises SetupError if it does not run or prints something
    else."""
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise SetupError(f"{path} does not run: {e}", remedy=_REMEDY) from e
    found = re.search(r"\b(20\d{6})\b", done.stdout)
    if found is None:
        raise SetupError(
            f"{path} --version says {done.stdout[:80]!r}, which has no release date.", remedy=_REMEDY
        )
    return int(found.group(1))


def cached_binary(cache_dir: Path) -> Path:
    """Where the pinned binary lies once fetched."""
    return cache_dir / "runtime" / f"runsc-{PINNED_SHA256[:16]}" / "runsc"


def find_runtime(cache_dir: Path, *, search_path: str | None = None) -> Runtime:
    """The runsc to use, without fetching anything. Raises SetupError saying what was found and what to do."""
    notes = ""
    if (found := shutil.which("runsc", path=search_path)) is not None:
        version = read_version(Path(found))
        if version >= MIN_VERSION:
            return Runtime(Path(found), version)
        notes = f"{found} is of {version} and hangs in checkpoint, so it is not used."
    cached = cached_binary(cache_dir)
    if cached.is_file():
        return Runtime(cached, read_version(cached), notes)
    raise SetupError(f"no usable gVisor runtime (runsc) on this machine. {notes}".strip(), remedy=_REMEDY)


def ensure_runtime(cache_dir: Path, *, search_path: str | None = None) -> Runtime:
    """`find_runtime`, fetching the pinned package if nothing usable is there. Raises SetupError,
    IntegrityError."""
    try:
        return find_runtime(cache_dir, search_path=search_path)
    except SetupError as missing:
        if platform.machine() != "x86_64":
            raise SetupError(
                f"{missing.message} The pinned package is for x86_64, this machine is {platform.machine()}.",
                remedy="Put runsc of 2024-07-29 or newer on PATH.",
            ) from missing
    target = cached_binary(cache_dir)
    with locked(target.parent.with_suffix(".lock")):
        if not target.is_file():
            _fetch(target)
    return find_runtime(cache_dir, search_path=search_path)


def _fetch(target: Path) -> None:
    if shutil.which("dpkg") is None:
        raise SetupError(
            "dpkg is not on this machine, so the pinned package cannot be unpacked.",
            remedy="Put runsc of 2024-07-29 or newer on PATH.",
        )
    mirror = apt.debian_mirror(apt.read_sources())
    with tempfile.TemporaryDirectory(dir=target.parent.parent, prefix=".fetch-") as scratch:
        work = Path(scratch)
        deb = apt.download([apt.source_line(mirror, PINNED_SUITE)], PINNED_PACKAGE, work)
        got = digest_file(deb)
        if got != PREFIX + PINNED_SHA256:
            raise IntegrityError(
                f"{deb.name} has {got}, expected {PREFIX}{PINNED_SHA256}; it was not unpacked."
            )
        done = subprocess.run(
            ["dpkg", "-x", deb, work / "tree"], capture_output=True, text=True, timeout=60, check=False
        )
        binaries = sorted((work / "tree").glob("usr/bin/runsc"))
        if done.returncode or not binaries:
            raise SetupError(f"{deb.name} could not be unpacked: {done.stderr.strip()[-200:]}")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".part")
        shutil.copyfile(binaries[0], partial)
        partial.chmod(0o755)
        os.replace(partial, target)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path` (made if missing, never removed) against other processes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)
