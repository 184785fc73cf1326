"""Start processes and be sure to end them. The only place in which a room starts a process.

A child gets its own session (so a terminal's Ctrl-C reaches only us and we decide), dies with its parent
(Linux PR_SET_PDEATHSIG), and is written to a ledger file before it runs, so that what a killed run left behind can be
found again by (pid, start time) and by no other process that later got the same pid.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Protocol

from tidemill.core.errors import SetupError
from tidemill.core.files import append_jsonl, read_jsonl

_PR_SET_PDEATHSIG = 1


class ProcessHandle(Protocol):
    """A started process."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """Exit code, or None while it runs."""
        ...

    def stop(self, *, grace_s: float = 5.0) -> int:
        """SIGTERM to the process group, SIGKILL after `grace_s`, reap; returns the exit code. Idempotent."""
        ...


class Launcher(Protocol):
    """Starts processes: on this machine here, on a cluster elsewhere."""

    def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None,
              log: Path | None = None) -> ProcessHandle: ...

    def stop_all(self, *, grace_s: float = 5.0) -> None: ...


@dataclass
class LocalProcess:
    """A child process of this one."""

    name: str
    popen: subprocess.Popen[bytes]

    @property
    def pid(self) -> int:
        return self.popen.pid

    def poll(self) -> int | None:
        return self.popen.poll()

    def stop(self, *, grace_s: float = 5.0) -> int:
        if self.popen.poll() is None:
            _signal_group(self.pid, signal.SIGTERM)
            try:
                self.popen.wait(grace_s)
            except subprocess.TimeoutExpired:
                _signal_group(self.pid, signal.SIGKILL)
        return self.popen.wait()


class LocalLauncher:
    """Launcher on this machine. `ledger` is a JSONL file of what was started; None keeps no record."""

    def __init__(self, ledger: Path | None = None) -> None:
        self._ledger = ledger
        self._processes: list[LocalProcess] = []

    def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str] | None = None,
              log: Path | None = None) -> LocalProcess:
        """Start `argv`; stdout and stderr go to `log` (appended) or are discarded. SetupError if it is missing."""
        out: IO[bytes] | int = log.open("ab") if log else subprocess.DEVNULL
        try:
            popen = subprocess.Popen(
                list(argv), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
                env=dict(os.environ) | dict(env or {}), preexec_fn=_die_with_parent,
            )
        except FileNotFoundError as e:
            raise SetupError(f"cannot start {name}: {argv[0]} does not exist") from e
        finally:
            if not isinstance(out, int):
                out.close()
        if self._ledger:
            append_jsonl(self._ledger, {"name": name, "pid": popen.pid, "start": start_time(popen.pid)})
        process = LocalProcess(name, popen)
        self._processes.append(process)
        return process

    def stop_all(self, *, grace_s: float = 5.0) -> None:
        for process in reversed(self._processes):
            process.stop(grace_s=grace_s)
        self._processes.clear()


def leftovers(ledger: Path) -> list[tuple[str, int]]:
    """(name, pid) of processes in the ledger that still run: same pid and same start time."""
    return [
        (str(row["name"]), int(row["pid"]))
        for row in read_jsonl(ledger)
        if row["start"] is not None and start_time(row["pid"]) == row["start"]
    ]


def end_leftovers(ledger: Path, *, grace_s: float = 2.0) -> list[str]:
    """End what an earlier, killed owner of this ledger left running; returns what was ended, as text."""
    ended: list[str] = []
    for name, pid in leftovers(ledger):
        _signal_group(pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while time.monotonic() < deadline and start_time(pid) is not None:
            time.sleep(0.02)
        if start_time(pid) is not None:
            _signal_group(pid, signal.SIGKILL)
        ended.append(f"{name} (pid {pid})")
    return ended


def start_time(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot (with its pid: unique), None if it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _signal_group(pid: int, sig: signal.Signals) -> None:
    try:
        os.killpg(pid, sig)
    except ProcessLookupError:
        return


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


