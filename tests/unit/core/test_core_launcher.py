"""Processes: started, logged, ended with their group, found again after their owner was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tidemill.core.errors import SetupError
from tidemill.core.files import append_jsonl
from tidemill.core.launcher import LocalLauncher, end_leftovers, leftovers, start_time

SLEEP = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.02)


def test_start_log_stop(tmp_path: Path) -> None:
    launcher = LocalLauncher(tmp_path / "ledger.jsonl")
    process = launcher.start("sleeper", SLEEP, log=tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text() == "up\n")
    assert process.poll() is None
    assert leftovers(tmp_path / "ledger.jsonl") == [("sleeper", process.pid)]
    launcher.stop_all()
    assert process.poll() == -signal.SIGTERM
    assert leftovers(tmp_path / "ledger.jsonl") == []
    assert process.stop() == -signal.SIGTERM


def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    code = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    process = LocalLauncher().start("stubborn", [sys.executable, "-c", code], log=tmp_path / "log")
    wait_for(lambda: (tmp_path / "log").read_text() == "up\n")
    assert process.stop(grace_s=0.2) == -signal.SIGKILL


def test_a_missing_program_is_named() -> None:
    with pytest.raises(SetupError, match="/no/such"):
        LocalLauncher().start("x", ["/no/such/program"])


def test_children_die_with_a_killed_owner(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    code = (
        "import sys, time; from pathlib import Path; from tidemill.core.launcher import LocalLauncher;"
        f"LocalLauncher(Path({str(ledger)!r})).start('child', {SLEEP!r}); print('started', flush=True); time.sleep(60)"
    )
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env=env)
    assert owner.stdout is not None
    with owner.stdout:
        assert owner.stdout.readline() == b"started\n"
        assert len(leftovers(ledger)) == 1
        owner.kill()
        owner.wait()
    wait_for(lambda: leftovers(ledger) == [])


def test_leftovers_are_ended_but_a_reused_pid_is_not(tmp_path: Path) -> None:
    ledger = tmp_path / "ledger.jsonl"
    stray = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL, start_new_session=True)
    other = subprocess.Popen(SLEEP, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        append_jsonl(ledger, {"name": "stray", "pid": stray.pid, "start": start_time(stray.pid)})
        append_jsonl(ledger, {"name": "old", "pid": other.pid, "start": 1})
        assert end_leftovers(ledger) == [f"stray (pid {stray.pid})"]
        assert stray.wait(5) != 0
        assert other.poll() is None
    finally:
        for process in (stray, other):
            process.kill()
            process.wait()
