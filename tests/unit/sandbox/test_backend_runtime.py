"""Finding the runtime: what is on PATH is looked at, old builds are refused with a reason; reading apt's sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidemill.core.errors import SetupError
from tidemill.sandbox import apt
from tidemill.sandbox.runtime import cached_binary, find_runtime


def program(path: Path, says: str, *, code: int = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\nexit {code}\n")
    path.chmod(0o755)
    return path


def test_a_new_enough_runsc_on_path_is_used(tmp_path: Path) -> None:
    found = program(tmp_path / "bin/runsc", "runsc version release-20250101.0")
    runtime = find_runtime(tmp_path / "cache", search_path=str(found.parent))
    assert (runtime.path, runtime.version, runtime.notes) == (found, 20250101, "")


def test_an_old_one_is_passed_over_with_its_reason(tmp_path: Path) -> None:
    old = program(tmp_path / "bin/runsc", "runsc version 0.0~20221219.0")
    with pytest.raises(SetupError, match="20221219") as caught:
        find_runtime(tmp_path / "cache", search_path=str(old.parent))
    assert "tidemill sandbox setup" in caught.value.remedy
    cached = program(cached_binary(tmp_path / "cache"), "runsc version 0.0~20240729.0")
    runtime = find_runtime(tmp_path / "cache", search_path=str(old.parent))
    assert (runtime.path, runtime.version) == (cached, 20240729)
    assert "20221219" in runtime.notes


@pytest.mark.parametrize("says", ["", "runsc version dev"])
def test_a_version_that_cannot_be_read_is_refused(tmp_path: Path, says: str) -> None:
    found = program(tmp_path / "bin/runsc", says)
    with pytest.raises(SetupError, match="no release date"):
        find_runtime(tmp_path / "cache", search_path=str(found.parent))


def test_nothing_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="no usable gVisor runtime") as caught:
        find_runtime(tmp_path / "cache", search_path=str(tmp_path))
    assert "tidemill sandbox setup" in str(caught.value)


def test_sources_of_both_formats(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text(
        "# deb http://no/debian bookworm main\n"
        "deb-src http://no/debian bookworm main\n"
        "deb [arch=amd64 signed-by=/k.gpg] http://vendor/repo stable-x main # why\n"
        "deb http://one/debian bookworm main contrib\n"
    )
    parts = tmp_path / "sources.list.d"
    parts.mkdir()
    (parts / "b.sources").write_text(
        "Types: deb\nURIs: http://two/debian http://three/debian\nSuites: trixie\n trixie-updates\nComponents: main\n"
        "Signed-By: /usr/share/keyrings/two.gpg\n\n"
        "Enabled: no\nTypes: deb\nURIs: http://off/debian\nSuites: bookworm\n\n"
        "Types: deb\nURIs: http://sec/debian-security\nSuites: bookworm-security\n"
        "Components: main\nSigned-By:\n -----BEGIN PGP\n"
    )
    (parts / "c.list.disabled").write_text("deb http://off/debian bookworm main\n")
    sources = apt.read_sources(tmp_path)
    assert [(s.uri, s.suites, s.signed_by) for s in sources] == [
        ("http://vendor/repo", ("stable-x",), "/k.gpg"),
        ("http://one/debian", ("bookworm",), ""),
        ("http://two/debian", ("trixie", "trixie-updates"), "/usr/share/keyrings/two.gpg"),
        ("http://three/debian", ("trixie", "trixie-updates"), "/usr/share/keyrings/two.gpg"),
        ("http://sec/debian-security", ("bookworm-security",), ""),
    ]
    assert apt.debian_mirror(sources).uri == "http://one/debian"
    security = apt.security_mirror(sources, "bookworm")
    assert security
    assert security.uri == "http://sec/debian-security"


def test_a_machine_without_a_debian_mirror_must_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [
        apt.Source("http://archive/ubuntu", ("noble",)),
        apt.Source("https://vendor/deb", ("stable",)),
        apt.Source("https://vendor/linux/debian", ("bookworm",), "", ("stable",)),
    ]
    monkeypatch.delenv("TIDEMILL_DEBIAN_MIRROR", raising=False)
    with pytest.raises(SetupError, match="TIDEMILL_DEBIAN_MIRROR"):
        apt.debian_mirror(sources)
    monkeypatch.setenv("TIDEMILL_DEBIAN_MIRROR", "http://mine/debian")
    assert apt.debian_mirror(sources).uri == "http://mine/debian"
    assert apt.security_mirror(sources, "bookworm") is None


def test_a_missing_key_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="debian-archive-keyring"):
        apt.keyring_of(apt.Source("http://one/debian", ("bookworm",), str(tmp_path / "none.gpg")))
