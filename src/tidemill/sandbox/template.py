"""Templates: root filesystems that sandboxes start from. `base` is Debian bookworm with Python, made once
into the cache.

A template's folder is named after the digest of its recipe, so a changed recipe is another template and an
old one is never changed under a running sandbox. Builds are guarded by a lock file and appear whole or not
at all. Knows no runtime: what a backend derives from a template (a booted and saved guest, for instance) it
keeps for itself, keyed by `Template.digest`.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tidemill.core.digests import PREFIX, digest_json
from tidemill.core.errors import NotFoundError, SetupError
from tidemill.core.files import sync_dir, write_json
from tidemill.sandbox import debian_root
from tidemill.sandbox.runtime import locked

RECIPES = {"base": debian_root.Recipe()}
SETUP_COMMAND = "tidemill sandbox setup"


@dataclass(frozen=True, slots=True)
class Template:
    """A finished template. `digest` is that of its recipe; `rootfs` must not be written to."""

    name: str
    digest: str
    rootfs: Path


def template_names() -> tuple[str, ...]:
    """Every template there is a recipe for, built or not."""
    return tuple(RECIPES)


def find_template(cache_dir: Path, name: str = "base") -> Template:
    """A built template. Raises NotFoundError for an unknown name, SetupError with the command if it is not built."""
    template = _planned(cache_dir, name)
    if not (template.rootfs.parent / "template.json").is_file():
        raise SetupError(
            f"template {name!r} is not built on this machine ({template.rootfs.parent} is missing).",
            remedy=f"Run `{SETUP_COMMAND}`.",
        )
    return template


def built_templates(cache_dir: Path) -> list[str]:
    """Names of the templates that are built on this machine."""
    found: list[str] = []
    for name in template_names():
        try:
            find_template(cache_dir, name)
        except SetupError:
            continue
        found.append(name)
    return found


def ensure_template(
    cache_dir: Path, name: str = "base", *, progress: Callable[[str], None], search_path: str | None = None
) -> Template:
    """`find_template`, building it first if needed (about a minute, needs root and the package mirror).

    `progress` gets one line per step. Waits for another process that is building it. On any failure
    nothing is left. Raises NotFoundError, SetupError with the remedy."""
    template = _planned(cache_dir, name)
    home = template.rootfs.parent
    if not (home / "template.json").is_file():
        home.parent.mkdir(parents=True, exist_ok=True)
        with locked(home.with_suffix(".lock")):
            if not (home / "template.json").is_file():
                _build(template, progress, search_path)
    return find_template(cache_dir, name)


def remove_stale_builds(folder: Path) -> int:
    """Delete what killed builds left in `folder`; the caller holds the lock. Returns how many there were."""
    stale = [p for p in folder.glob(".build-*") if p.is_dir()]
    for path in stale:
        shutil.rmtree(path)
    return len(stale)


def _planned(cache_dir: Path, name: str) -> Template:
    recipe = RECIPES.get(name)
    if recipe is None:
        raise NotFoundError(f"no template {name!r}.", remedy=f"Known: {', '.join(RECIPES)}.")
    digest = digest_json(recipe.plain())
    home = cache_dir / "templates" / f"{name}-{digest.removeprefix(PREFIX)[:16]}"
    return Template(name, digest, home / "rootfs")


def _build(template: Template, progress: Callable[[str], None], search_path: str | None) -> None:
    if os.geteuid() != 0:
        raise SetupError(f"building template {template.name!r} needs root.", remedy=f"Run `{SETUP_COMMAND}` as root.")
    home = template.rootfs.parent
    started = time.monotonic()
    remove_stale_builds(home.parent)
    progress(f"building template {template.name} (Debian packages from this machine's mirror; about a minute)")
    scratch = Path(tempfile.mkdtemp(dir=home.parent, prefix=".build-"))
    try:
        scratch.chmod(0o755)
        root = scratch / "rootfs"
        debian_root.build(RECIPES[template.name], root, scratch, progress=progress, search_path=search_path)
        packages = debian_root.installed_packages(root)
        write_json(scratch / "template.json", {"name": template.name, "digest": template.digest, "packages": packages})
        os.sync()
        scratch.rename(home)
        sync_dir(home.parent)
    except OSError as e:
        raise SetupError(
            f"template {template.name!r} could not be built: {e}",
            remedy="See whether the disk has room, then try again.",
        ) from e
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    size = sum(p.lstat().st_blocks * 512 for p in template.rootfs.rglob("*"))
    progress(
        f"template {template.name} is ready: {len(packages)} packages, {size / 2**20:.0f} MB, "
        f"{time.monotonic() - started:.0f} s"
    )


def describe(template: Template) -> dict[str, str]:
    """Package versions inside a built template."""
    return dict(json.loads((template.rootfs.parent / "template.json").read_text(encoding="utf-8"))["packages"])
