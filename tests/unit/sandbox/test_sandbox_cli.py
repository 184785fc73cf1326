"""The commands against a service with fake guests: what they print, where, and their exit codes."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tidemill.cli.main import main
from tidemill.core.launcher import start_time
from tidemill.sandbox.starting import ensure_daemon
from tidemill.sandbox.store.lock import lock_holder

FAKE = """
import sys
from tidemill.sandbox import daemon
from tidemill.sandbox.backends.fake import FakeBackend
daemon.make_backend = lambda name, *, state_dir, cache_dir: FakeBackend()
daemon.NAMES = ("fake",)
sys.exit(daemon.main(sys.argv[1:]))
"""


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    state_dir = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
    argv = (sys.executable, "-c", FAKE, "--state", str(state_dir), "--backend", "fake", "--detach")
    asyncio.run(ensure_daemon(state_dir, cache_dir=state_dir, argv=argv))
    yield state_dir
    pid = lock_holder(state_dir)
    if pid:
        os.kill(pid, signal.SIGKILL)
        while start_time(pid) is not None:
            time.sleep(0.01)
    shutil.rmtree(state_dir)


@pytest.fixture
def cli(folder: Path, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]
        ) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("TIDEMILL_STATE", str(folder))
    monkeypatch.setenv("TIDEMILL_CACHE", str(folder))

    def call(*args: str) -> tuple[int, str, str]:
        code: object = 0
        try:
            main(["sandbox", *args])
        except SystemExit as ended:
            code = ended.code or 0
        out, err = capsysbinary.readouterr()
        assert isinstance(code, int)
        return code, out.decode(), err.decode()

    return call


def test_run_passes_output_and_exit_code_on_and_leaves_nothing(cli) -> None:
    assert cli("run", "--", "echo", "-n", "--template") == (0, "-n --template\n", "")
    assert cli("run", "echo", "--backend")[1] == "--backend\n"
    assert cli("run", "--", "false")[0] == 1
    assert cli("run", "--", "sh", "-c", "exit 7")[0] == 7
    code, out, err = cli("run", "--timeout", "0.1", "--", "sleep", "5")
    assert (code, out) == (124, "")
    assert "ended after its 0.1 s" in err
    assert cli("run", "-e", "A=1", "-e", "B=x=y", "env")[1] == "A=1\nB=x=y\n"
    assert cli("run", "-C", "/tmp", "pwd")[1] == "/tmp\n"
    assert json.loads(cli("ls", "--json")[1]) == []


def test_create_exec_ls_rm(cli) -> None:
    first, second = cli("create")[1].strip(), cli("create", "--timeout", "7200")[1].strip()
    assert cli("exec", first, "--", "echo", "hi") == (0, "hi\n", "")
    head, *rows = cli("ls")[1].splitlines()
    assert head.split() == ["ID", "STATE", "TEMPLATE", "BACKEND", "LEASE", "AGE", "LEFT"]
    assert [row.split()[:5] for row in rows] == [[s, "running", "base", "fake", "-"] for s in (second, first)]
    listed = json.loads(cli("ls", "--json")[1])
    assert {i["sandbox_id"] for i in listed} == {first, second}
    assert json.loads(cli("ls", "--lease", "none", "--json")[1]) == []
    assert cli("rm", first) == (0, "", "removed 1\n")
    assert cli("rm", "--lease", "none") == (0, "", "removed 0\n")
    assert cli("rm", "--all") == (0, "", "removed 1\n")
    code, _, err = cli("exec", first, "true")
    assert code == 1
    assert "has ended (killed)" in err


@pytest.mark.parametrize(("args", "said"), [
    (("run", "--template", "none", "true"), "no template 'none'"),
    (("run", "--backend", "none", "true"), "no backend 'none'"),
    (("run", "--timeout", "-1", "true"), "timeout"),
    (("run", "-e", "nothing", "true"), "NAME=VALUE"),
    (("run", "no-such-program"), "no-such-program"),
    (("exec", "sbx-none", "true"), "no sandbox 'sbx-none'"),
    (("exec", "../../etc", "true"), "no sandbox"),
    (("rm", "sbx-none"), "no sandbox 'sbx-none'"),
    (("rm",), "--all or --lease"),
    (("rm", "x", "--all"), "only one"),
])
def test_mistakes_are_one_line_and_exit_code_2(cli, args: tuple[str, ...], said: str) -> None:
    code, out, err = cli(*args)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert said in err
    assert len(err.splitlines()) == 1
    assert json.loads(cli("ls", "--json")[1]) == []


def test_setup_needs_root(cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    code, _, err = cli("setup")
    assert code == 2
    assert "needs root" in err


def test_status_and_stop(cli, folder: Path) -> None:
    pid = lock_holder(folder)
    code, out, _ = cli("daemon", "status")
    assert code == 0
    assert f"pid {pid}, ok, 0 sandboxes" in out
    assert cli("daemon", "start")[1].endswith(f"pid {pid} on {folder}\n")
    cli("create")
    code, _, err = cli("daemon", "stop", "--kill")
    assert code == 0
    assert err == f"removed 1\nstopped the sandbox service with pid {pid}\n"
    assert cli("daemon", "status")[0] == 1
    assert json.loads(cli("daemon", "status", "--json")[1])["service"] is None
    assert cli("daemon", "stop") == (0, "", f"no sandbox service on {folder}\n")
