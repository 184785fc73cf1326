"""Names to objects: what comes with the package by a short name, what users write as `module:object` or
`file.py:object`.

Nothing is imported before it is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidemill.core.errors import ConfigError


def load_object(name: str, known: Mapping[str, str], *, kind: str) -> Any:
    """The object a name stands for. Raises ConfigError that lists the known names or says what failed to import."""
    path = known.get(name, name)
    module_name, colon, attribute = path.rpartition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"{kind} = {name!r}: neither one of {', '.join(sorted(known))} nor of the form module:object",
            field=kind, remedy=f"Write my_module:My{kind.capitalize()} or path/to/file.py:My{kind.capitalize()}.",
        )
    module = _import_file(Path(module_name), kind) if module_name.endswith(".py") else _import_module(module_name, kind)
    if not hasattr(module, attribute):
        raise ConfigError(f"{kind} = {name!r}: {module_name} has no {attribute}", field=kind)
    return getattr(module, attribute)


def construct(factory: Any, options: Mapping[str, Any], *, kind: str, name: str) -> Any:
    """factory(**options), where an option it does not take is a ConfigError. An instance is returned as it is."""
    if not callable(factory):
        if options:
            raise ConfigError(f"{kind} {name!r} is an object, not a class: it takes no options", field="options")
        return factory
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as e:
        raise ConfigError(f"{kind} {name!r}: options {sorted(options)}: {e}", field="options") from e
    return factory(**options)


def _import_module(name: str, kind: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as e:
        raise ConfigError(f"{kind} {name!r} cannot be imported: {e}", field=kind) from e


def _import_file(path: Path, kind: str) -> Any:
    if not path.is_file():
        raise ConfigError(f"{kind}: no file {path}", field=kind)
    name = "tidemill_user_" + re.sub(r"\W", "_", path.resolve().as_posix())
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as e:
        del sys.modules[name]
        raise ConfigError(f"{kind} {path} cannot be imported: {e}", field=kind) from e
    return module
