"""Names of backends to their classes, imported when asked for. A backend is constructed with (state_dir,
cache_dir)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import cast

from tidemill.core.errors import NotFoundError
from tidemill.sandbox.backends.base import Backend

_CLASSES = {
    "gvisor": "tidemill.sandbox.backends.gvisor:GvisorBackend",
    "unsafe": "tidemill.sandbox.backends.unsafe:UnsafeBackend",
}

NAMES = tuple(_CLASSES)
"""The default first. `unsafe` shares the host's kernel and is used only where a request names it."""


def make_backend(name: str, *, state_dir: Path, cache_dir: Path) -> Backend:
    """An unstarted backend. Raises NotFoundError listing the known names."""
    if name not in _CLASSES:
        raise NotFoundError(f"no backend {name!r}.", remedy=f"Known: {', '.join(NAMES)}.")
    module, _, cls = _CLASSES[name].partition(":")
    return cast("Backend", getattr(import_module(module), cls)(state_dir=state_dir, cache_dir=cache_dir))
