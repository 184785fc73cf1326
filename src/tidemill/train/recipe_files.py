"""Recipes as files: those of the package by name, any other by path, and single values changed before validation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from tidemill.core.config import load_yaml, set_dotted
from tidemill.core.errors import ConfigError


def packaged_recipes(package: str) -> dict[str, Path]:
    """The recipes of a package's folder `recipes`, by name in order."""
    folder = Path(str(files(package) / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"), key=lambda path: path.stem)}


def read_recipe(name: str, packaged: Mapping[str, Path], overrides: Sequence[str], *, seed: int | None,
                offered: Iterable[str], remedy: str = "") -> dict[str, Any]:
    """The mapping of a packaged recipe, or of the YAML file at the path `name`, with `key.path=value` overrides and the
    seed put in. ConfigError naming what is `offered` if it is neither."""
    path = packaged.get(name, Path(name))
    if not path.is_file():
        raise ConfigError(f"recipe = {name!r}: neither a file nor one of {', '.join(offered)}", field="recipe",
                          remedy=remedy)
    data = load_yaml(path)
    for assignment in overrides:
        set_dotted(data, assignment)
    if seed is not None:
        data["seed"] = seed
    return data
