"""Templates: built once, whole or not at all, with clear words when something is missing.

A small program stands in for mmdebstrap.
"""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from tidemill.core.errors import NotFoundError, SetupError
from tidemill.sandbox import apt, debian_root
from tidemill.sandbox.template import describe, ensure_template, find_template, template_names

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, as building a template does")
SAYS = """#!/bin/sh
echo "I: extracting archives..." >&2
for last; do root=$sources; sources=$last; done
echo "$@" >> {log}
mkdir -p $root; cd $root
mkdir -p etc usr/bin usr/local/bin var/lib/dpkg var/cache/apt tmp dev/shm var/mail
printf 'root:x:0:0::/root:/bin/bash\\n' > $root/etc/passwd
printf 'root:x:0:\\n' > $root/etc/group
ln -s /etc/passwd $root/etc/resolv.conf
echo x > $root/var/cache/apt/pkgcache.bin
echo x > $root/usr/bin/su; chmod 4755 $root/usr/bin/su
chmod 1777 $root/tmp; chmod 2775 $root/var/mail; chgrp 8 $root/var/mail
printf 'Package: bash\\nVersion: 5.2-1\\n\\nPackage: python3\\nVersion: 3.11\\n' > $root/var/lib/dpkg/status
{more}
"""


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A search path with a stand-in for mmdebstrap; `more` can be appended to it by `script`."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script(folder)
    for name in ("setpriv", "unshare"):
        (folder / name).symlink_to(f"/usr/bin/{name}")
    key = tmp_path / "key.gpg"
    key.touch()
    monkeypatch.setattr(apt, "read_sources", lambda: [apt.Source("http://mirror/debian", ("bookworm",), str(key))])
    return folder


def script(folder: Path, more: str = "") -> None:
    program = folder / "mmdebstrap"
    program.write_text(SAYS.format(log=folder.parent / "log", more=more))
    program.chmod(0o755)


@needs_root
def test_a_template_is_built_once_and_finished(tmp_path: Path, programs: Path) -> None:
    said: list[str] = []
    cache = tmp_path / "cache"
    with pytest.raises(SetupError, match="tidemill sandbox setup"):
        find_template(cache)
    made = ensure_template(cache, progress=said.append, search_path=str(programs))
    assert made == find_template(cache) == ensure_template(cache, progress=said.append, search_path="/nonexistent")
    assert "extracting archives..." in said
    assert "2 packages" in said[-1]
    assert describe(made) == {"bash": "5.2-1", "python3": "3.11"}
    (line,) = (tmp_path / "log").read_text().splitlines()
    assert "--include=procps,python3" in line
    root = made.rootfs
    passwd = (root / "etc/passwd").read_text()
    assert "user:x:1000:1000::/home/user:" in passwd
    assert "zygote:x:999:999:" in passwd
    assert not (root / "etc/resolv.conf").is_symlink()
    assert list((root / "var/cache/apt").iterdir()) == []
    assert (root / "usr/lib/tidemill/agent").read_bytes() == b""
    for path in [root, *root.rglob("*")]:
        info = path.lstat()
        if not stat.S_ISLNK(info.st_mode):
            assert not info.st_mode & 0o6022, path
        assert info.st_uid == (1000 if path == root / "home/user" else 0), path
    assert [p.name for p in (cache / "templates").iterdir() if p.name.startswith(".build-")] == []


@needs_root
@pytest.mark.parametrize("more", ["echo 'E: mirror is on fire' >&2; exit 25", "rm $root/etc/passwd"])
def test_a_build_that_fails_leaves_nothing(tmp_path: Path, programs: Path, more: str) -> None:
    script(programs, more)
    with pytest.raises(SetupError) as caught:
        ensure_template(tmp_path / "cache", progress=lambda line: None, search_path=str(programs))
    assert "exit" not in more or "mirror is on fire" in str(caught.value)
    assert [p.suffix for p in (tmp_path / "cache/templates").iterdir()] == [".lock"]
    script(programs)
    assert ensure_template(tmp_path / "cache", progress=lambda line: None, search_path=str(programs)).rootfs.is_dir()


@needs_root
def test_two_builders_make_one_and_leftovers_of_a_killed_one_go(tmp_path: Path, programs: Path) -> None:
    script(programs, "sleep 0.3")
    left = tmp_path / "cache/templates/.build-killed/rootfs"
    left.mkdir(parents=True)
    threads = [
        threading.Thread(
            target=ensure_template, args=(tmp_path / "cache",), kwargs={"progress": print, "search_path": str(programs)}
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len((tmp_path / "log").read_text().splitlines()) == 1
    assert not left.exists()


@needs_root
def test_a_build_that_does_not_end_is_ended_with_everything_it_started(tmp_path: Path, programs: Path) -> None:
    script(programs, f"echo $$ > {tmp_path}/started; sleep 1234 & wait")
    recipe, root = debian_root.Recipe(), tmp_path / "root"
    with pytest.raises(SetupError, match="did not end"):
        debian_root.build(recipe, root, tmp_path, progress=lambda line: None, search_path=str(programs), timeout_s=1.0)
    assert (tmp_path / "started").exists()
    running = [pid for pid in filter(str.isdigit, os.listdir("/proc")) if b"sleep\x001234" in _command_line(pid)]
    assert running == []


def _command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@needs_root
def test_a_missing_program_is_named_with_its_package(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="apt-get install mmdebstrap"):
        ensure_template(tmp_path, progress=lambda line: None, search_path=str(tmp_path))


def test_unknown_templates_are_refused(tmp_path: Path) -> None:
    assert "base" in template_names()
    for call in (
        lambda: find_template(tmp_path, "windows"),
        lambda: ensure_template(tmp_path, "windows", progress=print),
    ):
        with pytest.raises(NotFoundError, match="base"):
            call()


def test_a_changed_recipe_is_another_template(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tidemill.sandbox import template

    before = template._planned(tmp_path, "base")
    monkeypatch.setitem(template.RECIPES, "base", debian_root.Recipe(revision=99))
    after = template._planned(tmp_path, "base")
    assert before.digest != after.digest
    assert before.rootfs != after.rootfs
