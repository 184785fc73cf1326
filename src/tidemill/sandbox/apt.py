"""Reads the system's apt sources and runs apt-get on private lists and caches, so that neither is ever
changed.

Knows the two formats of source entries and nothing about what is fetched. The mirror is the one the machine is
configured with; a machine without any Debian entry (Ubuntu) names one in TIDEMILL_DEBIAN_MIRROR.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tidemill.core.config import read_environment
from tidemill.core.errors import SetupError

DEBIAN_SUITES = ("bookworm", "trixie", "forky", "sid", "stable", "testing", "unstable", "oldstable")
"""An entry with one of them, the component `main` and `debian` in its address tells where Debian packages come
from here; other vendors use the same suite names."""
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
APT_DIR = Path("/etc/apt")


@dataclass(frozen=True, slots=True)
class Source:
    """One enabled binary entry: base address, suites, the key file if the entry names one, and components."""

    uri: str
    suites: tuple[str, ...]
    signed_by: str = ""
    components: tuple[str, ...] = ("main",)


def read_sources(apt_dir: Path = APT_DIR) -> list[Source]:
    """Enabled `deb` entries of sources.list and sources.list.d (both formats), in apt's order."""
    files = [apt_dir / "sources.list"]
    parts = apt_dir / "sources.list.d"
    if parts.is_dir():
        files += sorted(p for p in parts.iterdir() if p.suffix in (".list", ".sources"))
    found: list[Source] = []
    for file in files:
        if file.is_file():
            text = file.read_text(encoding="utf-8", errors="replace")
            found += _stanzas(text) if file.suffix == ".sources" else _lines(text)
    return found


def _lines(text: str) -> Iterator[Source]:
    for line in text.splitlines():
        words = line.split("#", 1)[0].split()
        if not words or words[0] != "deb":
            continue
        signed_by = ""
        if len(words) > 1 and words[1].startswith("["):
            end = next((i for i, w in enumerate(words) if w.endswith("]")), len(words) - 1)
            for option in " ".join(words[1 : end + 1]).strip("[] ").split():
                name, _, value = option.partition("=")
                signed_by = value if name == "signed-by" else signed_by
            words = words[:1] + words[end + 1 :]
        if len(words) >= 3:
            yield Source(words[1], (words[2],), signed_by, tuple(words[3:]))


def _stanzas(text: str) -> Iterator[Source]:
    for stanza in text.split("\n\n"):
        fields: dict[str, str] = {}
        name = ""
        for line in stanza.splitlines():
            if line.startswith("#") or not line.strip():
                continue
            if line[0] in " \t":
                fields[name] = f"{fields.get(name, '')} {line.strip()}"
            else:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in (
            "no",
            "false",
        ):
            continue
        signed_by = fields.get("signed-by", "")
        for uri in fields.get("uris", "").split():
            yield Source(
                uri,
                tuple(fields.get("suites", "").split()),
                signed_by if signed_by.startswith("/") else "",
                tuple(fields.get("components", "").split()),
            )


def debian_mirror(sources: Sequence[Source]) -> Source:
    """The machine's Debian mirror: TIDEMILL_DEBIAN_MIRROR if set, else what its sources name. Raises SetupError if
    there is neither (Ubuntu, for instance)."""
    chosen = read_environment().debian_mirror
    if chosen:
        return Source(chosen, ())
    for source in sources:
        if _is_debian(source) and any(suite in DEBIAN_SUITES for suite in source.suites):
            return source
    raise SetupError("this machine's package sources name no Debian mirror.",
                     remedy="Set TIDEMILL_DEBIAN_MIRROR to the address of one, ending in /debian.")


def security_mirror(sources: Sequence[Source], codename: str) -> Source | None:
    """Where security updates of `codename` come from: the machine's entry, or None if it has none."""
    for source in sources:
        if _is_debian(source) and f"{codename}-security" in source.suites:
            return source
    return None


def _is_debian(source: Source) -> bool:
    return "main" in source.components and "debian" in source.uri.lower()


def keyring_of(source: Source) -> str:
    """The key file that signs `source`. Raises SetupError if none is installed."""
    path = Path(source.signed_by) if source.signed_by else KEYRING
    if not path.is_file():
        raise SetupError(
            f"{path} is missing, so packages cannot be verified.",
            remedy="Install it with `apt-get install debian-archive-keyring`.",
        )
    return str(path)


def source_line(source: Source, suite: str, component: str = "main") -> str:
    """A one-line entry that names its key file."""
    return f"deb [signed-by={keyring_of(source)}] {source.uri} {suite} {component}"


def download(lines: Sequence[str], package: str, into: Path, *, timeout_s: float = 300.0) -> Path:
    """Fetch one package (`name=version`) from the given entries into the folder `into`; apt verifies its
    signature chain.

    Lists and caches live below `into`. Raises SetupError with apt's last words.
    """
    if shutil.which("apt-get") is None:
        raise SetupError(
            "apt-get is not on this machine.", remedy=f"Install {package.split('=')[0]} by hand."
        )
    for folder in ("lists/partial", "cache/archives/partial"):
        (into / folder).mkdir(parents=True, exist_ok=True)
    (into / "sources.list").write_text("\n".join(lines) + "\n")
    options = {
        "Dir::Etc::sourcelist": into / "sources.list",
        "Dir::Etc::sourceparts": "/dev/null",
        "Dir::State::lists": into / "lists",
        "Dir::Cache": into / "cache",
        "APT::Sandbox::User": "root",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
        "Acquire::IndexTargets::deb::Contents-deb::DefaultEnabled": "false",
    }
    flags = [part for name, value in options.items() for part in ("-o", f"{name}={value}")]
    for command in (["apt-get", *flags, "-qq", "update"], ["apt-get", *flags, "-qq", "download", package]):
        _run(command, into, timeout_s)
    debs = sorted(into.glob("*.deb"))
    if len(debs) != 1:
        raise SetupError(f"apt-get download {package} left {len(debs)} packages in {into}, expected one.")
    return debs[0]


def _run(command: Sequence[str], cwd: Path, timeout_s: float) -> None:
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired as e:
        raise SetupError(
            f"`{command[-2]} {command[-1]}` did not end within {timeout_s:g} s.",
            remedy="See whether the package mirror can be reached.",
        ) from e
    if done.returncode:
        words = " ".join((done.stderr or done.stdout).split())[-400:]
        raise SetupError(
            f"apt-get could not fetch the package: {words}",
            remedy="See whether the package mirror can be reached.",
        )
