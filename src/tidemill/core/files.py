"""Files that are whole or absent: atomic replace with fsync, JSON Lines that survive a kill and a full disk.

A write that fails raises OSError with the file's name; `DISK_FULL` are the errnos for which freeing space helps.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})


def _named(error: OSError, path: Path) -> OSError:
    return error if error.filename else OSError(error.errno, error.strerror, str(path))


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
    except OSError as e:
        tmp.unlink(missing_ok=True)
        raise _named(e, path) from e
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
    """Append one line with a single write call; one writer at a time. What a writer killed in the middle of a line left
    is removed first, and a line that does not fit on the disk is removed again."""
    line = (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()
    with path.open("a+b", buffering=0) as f:
        size = _end_of_last_line(f)
        try:
            f.truncate(size)
            _write_whole(f, line)
        except OSError as e:
            f.truncate(size)
            raise _named(e, path) from e


def _write_whole(f: FileIO, data: bytes) -> None:
    """One write call; a disk with room for a part only is full."""
    if f.write(data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class WholeWriter:
    """A new file that takes every record with one write call, and raises OSError at once if it cannot."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        """Append `data` whole."""
        try:
            _write_whole(self._file, data)
        except OSError as e:
            raise _named(e, self._path) from e

    def flush(self) -> None:
        """Nothing is held back."""

    def close(self) -> None:
        self._file.close()


def _end_of_last_line(f: FileIO) -> int:
    """Bytes of the file that are whole lines."""
    end, step = f.seek(0, os.SEEK_END), 1
    while end:
        start = max(0, end - step)
        f.seek(start)
        found = f.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end, step = start, 65_536
    return 0


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a JSON Lines file; a last line cut short by a kill is left out. Missing file: no rows."""
    if not path.exists():
        return
    with path.open("rb") as f:
        for line in f:
            if not line.endswith(b"\n"):
                return
            yield json.loads(line)
