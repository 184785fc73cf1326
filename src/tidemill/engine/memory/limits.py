"""How much memory this process may still take: the smallest of its cgroups' limits (v1 or v2) and MemAvailable.

Reads files only. A file that is missing means that this kind of limit does not apply here.
"""

from __future__ import annotations

import os
from pathlib import Path

_UNLIMITED = 1 << 60
"""cgroup v1 writes a huge number where v2 writes `max`."""


def available_memory(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """(bytes still free, which limit that is). Raises OSError if not even meminfo can be read."""
    best, source = _mem_available(proc), "MemAvailable"
    for kind, controller, path in _memberships(proc):
        root = cgroup if kind == 2 else cgroup / "memory"
        if kind == 1 and controller != "memory":
            continue
        for folder in _ancestors(root, path):
            free = _free_v2(folder) if kind == 2 else _free_v1(folder)
            if free is not None and free < best:
                best, source = free, f"cgroup v{kind} limit of {folder}"
    return max(0, best), source


def resident_bytes() -> int:
    """Resident set of this process."""
    with Path("/proc/self/statm").open("rb") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _mem_available(proc: Path) -> int:
    for line in (proc / "meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise OSError(f"{proc / 'meminfo'} has no MemAvailable line")


def _memberships(proc: Path) -> list[tuple[int, str, str]]:
    """(cgroup version, controller, path) of this process."""
    found: list[tuple[int, str, str]] = []
    text = _read(proc / "self/cgroup") or ""
    for line in text.splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found.append((2, "", path))
        else:
            found.extend((1, c, path) for c in controllers.split(","))
    return found


def _ancestors(root: Path, path: str) -> list[Path]:
    """The group and its parents up to `root`. Inside a container the path may not exist below the mount: then
    `root`."""
    folder = root / path.lstrip("/")
    chain = [folder, *folder.parents]
    return [p for p in chain if p == root or root in p.parents]


def _free_v2(folder: Path) -> int | None:
    limit, used = _read(folder / "memory.max"), _read(folder / "memory.current")
    if limit is None or used is None or limit == "max":
        return None
    return int(limit) - int(used) + _inactive_file(folder, "inactive_file")


def _free_v1(folder: Path) -> int | None:
    limit, used = _read(folder / "memory.limit_in_bytes"), _read(folder / "memory.usage_in_bytes")
    if limit is None or used is None or int(limit) >= _UNLIMITED:
        return None
    return int(limit) - int(used) + _inactive_file(folder, "total_inactive_file")


def _inactive_file(folder: Path, key: str) -> int:
    """Page cache the kernel gives back first; it counts as used in the group but is free to us."""
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return int(value)
    return 0


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return None
