"""One way to read configuration: frozen dataclasses, validated from YAML by pydantic, unknown keys refused.

A room declares each option once as a frozen, keyword-only dataclass; this module turns YAML or a mapping into it and
turns every pydantic complaint into one ConfigError line per field.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError, with_config

from tidemill.core.errors import ConfigError

T = TypeVar("T")

strict_config = with_config(ConfigDict(extra="forbid"))
"""Decorator for configuration dataclasses: unknown keys are errors. Put it above @dataclass."""


def parse_config(cls: type[T], data: Mapping[str, Any], *, source: str) -> T:
    """Build `cls` from a mapping. Raises ConfigError naming `source`, each field, its value and what is expected."""
    try:
        return TypeAdapter(cls).validate_python(dict(data))
    except ValidationError as e:
        lines: list[str] = []
        for item in e.errors(include_url=False):
            loc = ".".join(str(p) for p in item["loc"]) or "(top level)"
            if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
                lines.append(f"{loc}: unknown key")
            else:
                lines.append(f"{loc} = {_short(item.get('input'))}: {item['msg']}")
        raise ConfigError(f"{source}: " + "; ".join(lines), field=str(e.errors()[0]["loc"])) from e


def load_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file whose top level is a mapping. Raises ConfigError with line and column on bad syntax."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise ConfigError(f"cannot read {path}: {e.strerror}", field=str(path)) from e
    except (yaml.YAMLError, UnicodeDecodeError) as e:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(e).split())}", field=str(path)) from e
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: the top level is a {type(data).__name__}, expected a mapping", field=str(path))
    return cast("dict[str, Any]", data)


def set_dotted(data: dict[str, Any], assignment: str) -> None:
    """Apply one `a.b.c=value` override in place; the value is parsed as YAML. Entries of a list are reached by their
    `name`: `data.python.weight=3`."""
    key, eq, value = assignment.partition("=")
    if not eq or not key:
        raise ConfigError(f"override {assignment!r} is not of the form key.path=value", field=assignment)
    node: dict[str, Any] = data
    *parents, leaf = key.split(".")
    for i, part in enumerate(parents):
        child: Any = node.setdefault(part, {})
        if isinstance(child, list):
            rows = [cast("dict[str, Any]", row) for row in cast("list[Any]", child) if isinstance(row, dict)]
            child = {str(row["name"]): row for row in rows if "name" in row}
            if i + 1 == len(parents) or parents[i + 1] not in child:
                raise ConfigError(f"override {assignment!r}: {part} is a list; name an entry and its field",
                                  field=assignment,
                                  remedy=f"Entries: {', '.join(child) or 'none with names'}.")
        elif not isinstance(child, dict):
            raise ConfigError(f"override {assignment!r}: {part} is not a mapping", field=assignment)
        node = cast("dict[str, Any]", child)
    try:
        node[leaf] = yaml.safe_load(value)
    except yaml.YAMLError as e:
        raise ConfigError(f"override {assignment!r}: the value is not valid YAML", field=assignment) from e


def to_plain(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON-able data (tuples become lists, paths strings)."""
    adapter: TypeAdapter[Any] = TypeAdapter(cast("type[Any]", type(config)))
    return cast("dict[str, Any]", adapter.dump_python(config, mode="json"))


def require(condition: bool, *, field: str, value: object, expected: str) -> None:
    """Raise ConfigError `field = value: expected …` unless `condition`; for __post_init__ checks."""
    if not condition:
        raise ConfigError(f"{field} = {_short(value)}: expected {expected}", field=field)


def require_positive(owner: object, *names: str, prefix: str = "") -> None:
    """`require` each of these fields of `owner` to be a number above 0. Errors name them behind `prefix`."""
    for name in names:
        value = getattr(owner, name)
        require(value > 0, field=prefix + name, value=value, expected="a number above 0")


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


@dataclass(frozen=True, kw_only=True)
class Environment:
    """Every environment variable tidemill reads; nothing else reads os.environ."""

    state_dir: Path
    """TIDEMILL_STATE: sandbox daemon state (store, sockets, snapshots). Default: ~/.local/state/tidemill."""
    cache_dir: Path
    """TIDEMILL_CACHE: downloaded runtime packages and built templates. Default: ~/.cache/tidemill."""
    kernels: str
    """TIDEMILL_KERNELS: kernel path to force (`ref`); empty chooses the best available."""
    debian_mirror: str
    """TIDEMILL_DEBIAN_MIRROR: where Debian packages come from on a machine whose sources name no Debian mirror."""
    e2b_api_url: str
    """E2B_API_URL: use this sandbox service instead of the local daemon; empty means local."""


def read_environment(environ: Mapping[str, str] | None = None) -> Environment:
    """Read and validate the variables. Raises ConfigError on a bad value."""
    env = os.environ if environ is None else environ
    kernels = env.get("TIDEMILL_KERNELS", "")
    if kernels not in ("", "ref"):
        raise ConfigError(f"TIDEMILL_KERNELS = {kernels!r}: expected 'ref' or unset", field="TIDEMILL_KERNELS")
    home = Path(env.get("HOME", "/root"))
    state = env.get("TIDEMILL_STATE") or str(Path(env.get("XDG_STATE_HOME") or home / ".local/state") / "tidemill")
    cache = env.get("TIDEMILL_CACHE") or str(Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "tidemill")
    for name, value in (("TIDEMILL_STATE", state), ("TIDEMILL_CACHE", cache)):
        if not Path(value).is_absolute():
            raise ConfigError(f"{name} = {value!r}: expected an absolute path", field=name)
    return Environment(
        state_dir=Path(state), cache_dir=Path(cache), kernels=kernels,
        debian_mirror=env.get("TIDEMILL_DEBIAN_MIRROR", ""), e2b_api_url=env.get("E2B_API_URL", ""),
    )


def replace(config: T, **changes: Any) -> T:
    """dataclasses.replace under one name, so that checks in __post_init__ run again."""
    return dataclasses.replace(config, **changes)  # type: ignore[type-var]
