"""Files that are whole or absent: atomic replace with fsync, JSON Lines that survive a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replacing(path: Path) -> Generator[BinaryIO]:
    """A file to write beside `path`; at the end of the block it is fsynced and renamed over `path`, and the folder is
    fsynced. On any error the old file stays whole and no part remains."""
    tmp = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with tmp.open("wb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        tmp.replace(path)
    except BaseException:
        tmp.unlink(missing_ok=True)
        raise
    sync_dir(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a whole file by `replacing`."""
    with replacing(path) as f:
        f.write(data)


def write_json(path: Path, value: Any) -> None:
    """Indented JSON, written atomically."""
    write_atomic(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def sync_dir(path: Path) -> None:
    """fsync a directory so that renames in it survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def append_jsonl(path: Path, row: dict[str, Any]) -> None:
    """Append one line with a single write call."""
    line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
    with path.open("ab") as f:
        f.write(line)


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON Lines file; a last line cut short by a kill is left out. Missing file: no rows."""
    if not path.exists():
        return
    with path.open("rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)
