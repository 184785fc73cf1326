"""Configuration: unknown keys, bad values, overrides and the environment table."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tidemill.core.config import load_yaml, parse_config, read_environment, require, set_dotted, strict_config, to_plain
from tidemill.core.errors import ConfigError


@strict_config
@dataclass(frozen=True, kw_only=True)
class Inner:
    size: int

    def __post_init__(self) -> None:
        require(self.size > 0, field="size", value=self.size, expected="a positive integer")


@strict_config
@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner
    sizes: tuple[int, ...] = ()


def test_valid_data_becomes_frozen_dataclasses_and_back() -> None:
    outer = parse_config(Outer, {"name": "a", "inner": {"size": 2}, "sizes": [1, 2]}, source="x.yaml")
    assert outer == Outer(name="a", inner=Inner(size=2), sizes=(1, 2))
    assert to_plain(outer) == {"name": "a", "inner": {"size": 2}, "sizes": [1, 2]}


@pytest.mark.parametrize(("data", "message"), [
    ({"name": "a", "inner": {"size": 2}, "nmae": 1}, "nmae: unknown key"),
    ({"name": "a", "inner": {"size": 2, "x": 1}}, "inner.x: unknown key"),
    ({"name": "a"}, "inner"),
    ({"name": "a", "inner": {"size": "many"}}, "inner.size = 'many'"),
])
def test_bad_data_names_source_field_and_value(data: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.yaml: ") as e:
        parse_config(Outer, data, source="x.yaml")
    assert message in str(e.value)


def test_a_failed_check_in_post_init_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="size = 0"):
        parse_config(Outer, {"name": "a", "inner": {"size": 0}}, source="x.yaml")


def test_yaml_problems_are_config_errors(tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    for text, message in (("a: [1", "not valid YAML"), ("- 1", "expected a mapping")):
        bad.write_text(text)
        with pytest.raises(ConfigError, match=message):
            load_yaml(bad)
    with pytest.raises(ConfigError, match="cannot read"):
        load_yaml(tmp_path / "none.yaml")
    bad.write_bytes(b"a: \xff")
    with pytest.raises(ConfigError, match="not valid YAML"):
        load_yaml(bad)


def test_overrides() -> None:
    data: dict[str, object] = {"a": {"b": 1}, "c": 2}
    set_dotted(data, "a.b=3")
    set_dotted(data, "a.d=[x, y]")
    assert data == {"a": {"b": 3, "d": ["x", "y"]}, "c": 2}
    for bad in ("a.b", "=1", "c.d=1", "a.b=[1"):
        with pytest.raises(ConfigError):
            set_dotted(data, bad)


def test_overrides_reach_entries_of_lists_by_name() -> None:
    rows = [{"name": "x", "of": {"w": 1}}, {"name": "y"}, 3]
    data: dict[str, object] = {"rows": rows}
    set_dotted(data, "rows.x.of.w=2")
    set_dotted(data, 'rows.y.v=""')
    assert data == {"rows": [{"name": "x", "of": {"w": 2}}, {"name": "y", "v": ""}, 3]}
    for bad in ("rows.x=1", "rows.z.v=1", "rows.0.v=1"):
        with pytest.raises(ConfigError, match=r"rows is a list; name an entry and its field") as e:
            set_dotted(data, bad)
        assert e.value.remedy == "Entries: x, y."


def test_environment() -> None:
    env = read_environment({"HOME": "/h"})
    assert env.state_dir == Path("/h/.local/state/tidemill")
    assert env.cache_dir == Path("/h/.cache/tidemill")
    assert read_environment({"TIDEMILL_STATE": "/s"}).state_dir == Path("/s")
    with pytest.raises(ConfigError, match="TIDEMILL_KERNELS"):
        read_environment({"TIDEMILL_KERNELS": "fast"})
    with pytest.raises(ConfigError, match="absolute"):
        read_environment({"TIDEMILL_CACHE": "here"})
