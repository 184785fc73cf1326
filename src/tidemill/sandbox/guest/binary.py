"""Where the guest agent and the zygote lie: the installed ones, or in a checkout the agent built from its
sources on first use.

A wheel carries the binary and no C sources; a checkout has the sources, and its binary is kept in the
cache under their digest, so an edited source is never run stale.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from tidemill.core.digests import PREFIX, digest_bytes
from tidemill.core.errors import SetupError
from tidemill.sandbox.runtime import locked

FOLDER = Path(__file__).parent
FLAGS = ("-std=gnu11", "-O2", "-g0", "-static", "-Wall", "-Wextra")
_REMEDY = "Install it with `apt-get install gcc libc6-dev`."


def zygote_script() -> Path:
    """The Python program that forks interpreter sessions inside a guest."""
    return FOLDER / "zygote.py"


def agent_sources() -> list[Path]:
    """C files and headers, in a fixed order; none in an installed wheel."""
    return sorted(p for p in FOLDER.iterdir() if p.suffix in (".c", ".h"))


def agent_binary(cache_dir: Path, *, search_path: str | None = None) -> Path:
    """The static agent. Builds it if this is a checkout and its sources have not been built yet. Raises
    SetupError naming the missing package."""
    sources = agent_sources()
    if not sources:
        installed = FOLDER / "agent"
        if not installed.is_file():
            raise SetupError(
                f"{installed} is missing from this installation.", remedy="Install tidemill again, on Linux."
            )
        return installed
    digest = digest_bytes(*(p.name.encode() + b"\0" + p.read_bytes() for p in sources), " ".join(FLAGS).encode())
    target = cache_dir / "guest" / f"agent-{digest.removeprefix(PREFIX)[:16]}"
    if not target.is_file():
        with locked(target.with_suffix(".lock")):
            if not target.is_file():
                build_agent(target, search_path=search_path)
    return target


def build_agent(target: Path, *, search_path: str | None = None, extra_flags: tuple[str, ...] = ()) -> None:
    """Compile and link the agent to `target`, whole or not at all. Raises SetupError."""
    compiler = shutil.which("cc", path=search_path)
    if compiler is None:
        raise SetupError("the guest agent is not built, and there is no C compiler (cc).", remedy=_REMEDY)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as scratch:
        made = Path(scratch) / "agent"
        command = [
            compiler,
            *FLAGS,
            *extra_flags,
            "-o",
            str(made),
            *(str(p) for p in agent_sources() if p.suffix == ".c"),
        ]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=120,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as e:
            raise SetupError("the C compiler did not end within 120 s.") from e
        if done.returncode:
            missing = "-lc" in done.stderr or "libc.a" in done.stderr or "No such file" in done.stderr
            raise SetupError(
                f"the guest agent does not build: {done.stderr.strip()[-400:]}",
                remedy="The static C library seems to be missing: `apt-get install libc6-dev`." if missing else "",
            )
        made.chmod(0o755)
        os.replace(made, target)
