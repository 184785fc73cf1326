"""Ids, digests, files, errors, token log."""

import os
import pickle
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core import errors
from tidemill.core.digests import canonical_json, digest_bytes, digest_file, digest_json
from tidemill.core.files import DISK_FULL, append_jsonl, read_jsonl, write_atomic, write_json
from tidemill.core.ids import new_id
from tidemill.core.token_log import TokenLog


@given(st.lists(st.integers(0, 2**48 - 1), min_size=2, max_size=2, unique=True))
def test_ids_sort_by_time(times: list[int]) -> None:
    early, late = sorted(times)
    assert new_id("x", now_ms=early) < new_id("x", now_ms=late)
    assert len(new_id("sbx")) == len("sbx-") + 18


def test_digests_agree_and_do_not_depend_on_key_order(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc" * 1000)
    assert digest_file(tmp_path / "f", chunk_bytes=7) == digest_bytes(b"abc" * 500, b"abc" * 500)
    assert digest_json({"a": 1, "b": 2}) == digest_json({"b": 2, "a": 1})
    with pytest.raises(ValueError, match="JSON"):
        canonical_json(float("nan"))


def test_atomic_write_leaves_the_old_file_when_it_fails(tmp_path: Path) -> None:
    target = tmp_path / "f.json"
    write_json(target, {"a": 1})
    with pytest.raises(TypeError):
        write_atomic(target, "not bytes")  # type: ignore[arg-type]
    assert target.read_text() == '{\n  "a": 1\n}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["f.json"]


def test_jsonl_leaves_out_a_cut_last_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert list(read_jsonl(path)) == []
    append_jsonl(path, {"i": 1})
    append_jsonl(path, {"i": 2})
    with path.open("ab") as f:
        f.write(b'{"i": 3')
    assert list(read_jsonl(path)) == [{"i": 1}, {"i": 2}]
    append_jsonl(path, {"i": 4})
    assert list(read_jsonl(path)) == [{"i": 1}, {"i": 2}, {"i": 4}]


@pytest.mark.parametrize("left", [b'{"i": 1}\n' + b"x" * 200_000, b"x" * 70_000, b"\n" + b"y" * 65_536])
def test_jsonl_goes_on_after_the_last_whole_line(tmp_path: Path, left: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(left)
    append_jsonl(path, {"i": 2})
    assert path.read_bytes() == left[: left.rfind(b"\n") + 1] + b'{"i": 2}\n'


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_a_full_disk_is_an_error_that_names_the_file_and_leaves_whole_lines(tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=True)
    path = tmp_path / "rows.jsonl"

    def fill() -> None:
        for _ in range(1000):
            append_jsonl(path, {"text": "x" * 900})

    try:
        with pytest.raises(OSError, match=r"No space left on device: .*rows\.jsonl") as full:
            fill()
        assert full.value.errno in DISK_FULL
        assert len(list(read_jsonl(path))) >= 60
        assert path.read_bytes().endswith(b"}\n")
        with pytest.raises(OSError, match=r"state\.json"):
            write_json(tmp_path / "state.json", ["x" * 10_000])
        assert [p.name for p in tmp_path.iterdir()] == ["rows.jsonl"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_errors_say_the_remedy_and_survive_pickling() -> None:
    error = errors.ConfigError("size = 0", field="size", remedy="Give a positive size.")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.field, type(copy)) == ("size = 0. Give a positive size.", "size", errors.ConfigError)
    assert isinstance(error, ValueError)
    assert isinstance(errors.DeadlineError("late"), TimeoutError)
    assert str(errors.NotFoundError("no such thing")) == "no such thing"
    assert errors.BusyError("x").retryable
    assert not error.retryable


def test_token_log() -> None:
    log = TokenLog()
    log.give([1, 2])
    log.sample([3], [-0.5], [7])
    assert (log.ids, log.sampled, log.logprobs, log.versions) == (
        [1, 2, 3], [False, False, True], [0.0, 0.0, -0.5], [-1, -1, 7])
    assert (len(log), log.num_sampled) == (3, 1)
    with pytest.raises(ValueError, match="lengths differ"):
        log.sample([1, 2], [0.0], [1])
