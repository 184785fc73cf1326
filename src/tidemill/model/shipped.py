"""Models that come with the package: folders under weights/, by name."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from tidemill.core.errors import InputError


def shipped_names() -> list[str]:
    """Names of the models in this installation."""
    root = _root()
    return sorted(p.parent.name for p in root.glob("*/config.json")) if root.is_dir() else []


def shipped_model(name: str) -> Path:
    """The folder of a model. InputError if there is none of this name."""
    if name not in shipped_names():
        raise InputError(f"{name!r} does not come with the package", field="model",
                         remedy=f"There are: {', '.join(shipped_names()) or 'none'}.")
    return _root() / name


def find_model(name: str) -> Path | None:
    """The folder `name` if it holds a model, else the model of that name that comes with the package, if any."""
    if (Path(name) / "config.json").is_file():
        return Path(name)
    return shipped_model(name) if name in shipped_names() else None


def _root() -> Path:
    return Path(str(files("tidemill.model"))) / "weights"
