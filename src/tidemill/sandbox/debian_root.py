"""Makes a small Debian root filesystem with mmdebstrap, finished so that the sandbox's user can write
nowhere in it.

The agent gives the user fresh folders in memory over /home/user, /tmp, /var/tmp and /dev/shm; everything
else belongs to root and no file here is setuid or writable for others, which is what makes a reset from
inside complete. Mirror and keys are the machine's own. Starts nothing that outlives the call, even if
this process is killed.
"""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tidemill.core.errors import SetupError
from tidemill.sandbox import apt

USER_ID = 1000
ZYGOTE_ID = 999
GUEST_FOLDER = "usr/lib/tidemill"
"""Inside: empty files `agent` and `zygote.py`, for backends to mount the real ones over."""
_PATH = "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin"
_ROOM_BYTES = 1 << 30
_TIED_TO_US = (
    "setpriv --pdeathsig KILL unshare --mount --propagation private --pid --fork --kill-child=KILL --mount-proc"
)
"""Killed with us; mounts and processes live in namespaces of their own and go with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides what a root filesystem holds, except the versions the mirror has on the day."""

    suite: str = "bookworm"
    packages: tuple[str, ...] = ("procps", "python3")
    excluded: tuple[str, ...] = (
        "/usr/share/doc/*",
        "/usr/share/man/*",
        "/usr/share/locale/*",
        "/usr/share/info/*",
        "/usr/share/lintian/*",
        "/usr/share/bash-completion/*",
    )
    revision: int = 1
    """Raised when the finishing steps of this file change."""

    def plain(self) -> dict[str, Any]:
        """JSON-able, for the digest."""
        return asdict(self)


def build(
    recipe: Recipe,
    root: Path,
    scratch: Path,
    *,
    progress: Callable[[str], None],
    search_path: str | None = None,
    timeout_s: float = 900.0,
) -> None:
    """Make `root` (must not exist). `scratch` is an existing folder for temporary files. Raises SetupError."""
    for program, package in (("mmdebstrap", "mmdebstrap"), ("unshare", "util-linux"), ("setpriv", "util-linux")):
        if shutil.which(program, path=search_path) is None:
            raise SetupError(
                f"{program} is not on this machine.", remedy=f"Install it with `apt-get install {package}`."
            )
    if (free := shutil.disk_usage(scratch).free) < _ROOM_BYTES:
        raise SetupError(
            f"{scratch} has {free / 2**20:.0f} MB free; the build needs {_ROOM_BYTES / 2**20:.0f}.",
            remedy="Free some space, or set TIDEMILL_CACHE to a folder on a larger disk.",
        )
    sources = scratch / "sources.list"
    sources.write_text("\n".join(source_lines(recipe.suite)) + "\n")
    program = shutil.which("mmdebstrap", path=search_path) or "mmdebstrap"
    command = [
        *_TIED_TO_US.split(),
        *f"{program} --variant=essential --mode=root --format=directory".split(),
        f"--include={','.join(recipe.packages)}",
        "--dpkgopt=force-unsafe-io",
        *(f"--dpkgopt=path-exclude={p}" for p in recipe.excluded),
        '--aptopt=Acquire::Languages "none"',
        '--aptopt=Acquire::Retries "3"',
        *(recipe.suite, str(root), str(sources)),
    ]
    _run(command, progress, timeout_s)
    progress("finishing: users, folders, permissions")
    finish(root)


def source_lines(suite: str) -> list[str]:
    """Entries for `suite` and its security updates from the machine's mirrors. Raises SetupError."""
    sources = apt.read_sources()
    lines = [apt.source_line(apt.debian_mirror(sources), suite)]
    if (security := apt.security_mirror(sources, suite)) is not None:
        lines.append(apt.source_line(security, f"{suite}-security"))
    return lines


def _run(command: Sequence[str], progress: Callable[[str], None], timeout_s: float) -> None:
    """Run to the end, one progress line per line of output; killed with all its children on any way out."""
    last: list[str] = []
    deadline = time.monotonic() + timeout_s
    with (
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=_environment(),
        ) as process,
        selectors.DefaultSelector() as wait,
    ):
        assert process.stdout is not None
        wait.register(process.stdout, selectors.EVENT_READ)
        try:
            rest = b""
            while True:
                if not wait.select(max(0.0, deadline - time.monotonic())):
                    raise SetupError(
                        f"mmdebstrap did not end within {timeout_s:g} s; it said: {' / '.join(last[-3:])}",
                        remedy="See whether the package mirror can be reached.",
                    )
                data = os.read(process.stdout.fileno(), 65_536)
                if not data:
                    break
                *lines, rest = (rest + data).split(b"\n")
                for raw in lines:
                    line = raw.decode("utf-8", "replace").rsplit("\r", 1)[-1].strip()
                    if line.startswith("I: "):
                        progress(line[3:])
                    if line:
                        last.append(line)
            code = process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired as e:
            raise SetupError(f"mmdebstrap did not end within {timeout_s:g} s.") from e
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if code:
        words = [line for line in last if line.startswith(("E: ", "W: ", "mmdebstrap", "dpkg"))] or last
        raise SetupError(
            f"mmdebstrap failed ({code}): {' / '.join(words[-4:])}",
            remedy="See whether the package mirror can be reached and the disk has room.",
        )


def _environment() -> dict[str, str]:
    """Only what a build may depend on."""
    return {
        "PATH": f"/usr/local/sbin:{_PATH}",
        "LC_ALL": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        "TMPDIR": "/tmp",
    }


def finish(root: Path) -> None:
    """Users, slim shell start-up, mount points, and no place left that anyone but root can write. Mutates `root`."""
    _write(
        root,
        "etc/passwd",
        "user:x:1000:1000::/home/user:/bin/bash\nzygote:x:999:999::/:/usr/sbin/nologin\n",
        append=True,
    )
    _write(root, "etc/group", "user:x:1000:\nzygote:x:999:\n", append=True)
    # A login shell reads this every time: no subshells, no folder to walk through.
    _write(root, "etc/profile", f"export PATH={_PATH}\n[ \"${{PS1-}}\" ] && PS1='\\w\\$ '\nreturn 0\n")
    _write(root, "etc/bash.bashrc", "[ \"${PS1-}\" ] && PS1='\\w\\$ '\nreturn 0\n")
    _write(root, "etc/hostname", "sandbox\n")
    _write(root, "etc/hosts", "127.0.0.1 localhost sandbox\n::1 localhost\n")
    _write(root, "etc/resolv.conf", "")
    _write(root, "etc/machine-id", "")
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    for name in ("agent", "zygote.py"):
        _write(root, f"{GUEST_FOLDER}/{name}", "")
    for folder in ("home/user", "dev/shm", "proc", "sys"):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for rubbish in (
        "var/cache/apt",
        "var/lib/apt/lists",
        "var/log",
        "usr/share/doc",
        "usr/share/man",
        "usr/share/locale",
    ):
        _empty(root / rubbish)
    for device in (root / "dev").iterdir():
        # Every backend brings its own /dev; nodes here would only be in the way.
        if not device.is_dir() or device.is_symlink():
            device.unlink()
    _close_to_others(root)
    os.chown(root / "home/user", USER_ID, USER_ID)


def _close_to_others(root: Path) -> None:
    """Take setuid, setgid and every write bit of group and others; all of it belongs to root."""
    for path in [root, *root.rglob("*")]:
        info = path.lstat()
        if info.st_uid or info.st_gid:
            os.lchown(path, 0, 0)
        if stat.S_ISLNK(info.st_mode):
            continue
        mode = stat.S_IMODE(info.st_mode)
        closed = mode & ~(stat.S_ISUID | stat.S_ISGID | stat.S_ISVTX | 0o022)
        if closed != mode or info.st_uid or info.st_gid:
            path.chmod(closed)


def _write(root: Path, name: str, text: str, *, append: bool = False) -> None:
    """A root-owned file; whatever was there (a link out of the tree, say) is replaced, not followed."""
    path = root / name
    before = path.read_text(encoding="utf-8") if append else ""
    mode = stat.S_IMODE(path.lstat().st_mode) if append else 0o644
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(before + text, encoding="utf-8")
    path.chmod(mode)


def _empty(folder: Path) -> None:
    if folder.is_dir():
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()


def installed_packages(root: Path) -> dict[str, str]:
    """Names and versions from the tree's dpkg status file."""
    found: dict[str, str] = {}
    name = ""
    for line in (root / "var/lib/dpkg/status").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(": ")
        if key == "Package":
            name = value
        elif key == "Version":
            found[name] = value
    return found
