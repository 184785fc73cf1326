"""Local text as documents: plain files (also gzip and dictzip) and JSON Lines with a text field.

Excerpts are found once, in the order of their paths, and read again when they are wanted. A file is a document, or
several if it is large; a row of a .jsonl file is one. A document is read in excerpts cut at line ends, each a sequence
of its own; whether it is held out is decided for the whole document. Everything is UTF-8.
"""

from __future__ import annotations

import glob
import gzip
import json
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tidemill.core.digests import digest_bytes, digest_json
from tidemill.core.errors import ConfigError, InputError

DOCUMENT_BYTES = 32_768
"""A larger file is cut into documents of about this size."""
_COMPRESSED = (".gz", ".dz")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes [start, stop) of a file's (decompressed) content: an excerpt, or a JSON row."""

    path: Path
    start: int
    stop: int
    digest: str
    document: str
    """Digest of the document it is a part of."""
    is_end: bool
    """It ends its document."""


def find_files(patterns: Sequence[str], *, field: str) -> list[Path]:
    """Files that match the glob patterns (`**` for any depth; `{stdlib}` is Python's standard library; a leading `!`
    takes matches away), sorted. ConfigError if a pattern matches nothing."""
    wanted: set[str] = set()
    for pattern in patterns:
        full = pattern.removeprefix("!").replace("{stdlib}", sysconfig.get_paths()["stdlib"])
        found = {name for name in glob.iglob(full, recursive=True) if Path(name).is_file()}
        if pattern.startswith("!"):
            wanted -= found
        elif not found:
            raise ConfigError(f"{field}: {pattern!r} matches no file", field=field,
                              remedy="Install the package the recipe names, or change the pattern.")
        else:
            wanted |= found
    if not wanted:
        raise ConfigError(f"{field}: no file is left", field=field)
    return [Path(name) for name in sorted(wanted)]


def spans_of(path: Path, *, excerpt_bytes: int) -> list[Span]:
    """The excerpts of a file, blank ones left out; rows of a .jsonl file are not cut. InputError if it cannot be read
    or is not UTF-8."""
    data = read_content(path)
    rows = path.suffix == ".jsonl"
    spans: list[Span] = []
    for start, stop in _pairs(_row_ends(data) if rows else _cut_ends(data, 0, len(data), DOCUMENT_BYTES)):
        document = digest_bytes(data[start:stop])
        for first, end in _pairs([stop] if rows else _cut_ends(data, start, stop, excerpt_bytes), start):
            if data[first:end].strip():
                spans.append(Span(path, first, end, digest_bytes(data[first:end]), document, is_end=end == stop))
    return spans


class Reader:
    """Reads excerpts again; keeps the content of the last few files."""

    def __init__(self) -> None:
        self._content = lru_cache(maxsize=8)(read_content)

    def text(self, span: Span) -> str:
        """Text of an excerpt. InputError if the file changed since it was found."""
        part = self._content(span.path)[span.start : span.stop]
        if digest_bytes(part) != span.digest:
            raise InputError(f"{span.path} changed while it was in use", field=str(span.path),
                             remedy="Leave the data alone during a training, or start a new one.")
        return part.decode()

    def row(self, span: Span) -> dict[str, Any]:
        """A JSON row. InputError naming file and byte if it is no JSON object."""
        text = self.text(span)
        try:
            row = json.loads(text)
        except ValueError as e:
            raise InputError(f"{span.path}: the row at byte {span.start} is not JSON: {e}",
                             field=str(span.path)) from e
        if not isinstance(row, dict):
            raise InputError(f"{span.path}: the row at byte {span.start} is no object", field=str(span.path))
        return row


def digest_of(spans: Sequence[Span]) -> str:
    """One digest of all documents, whatever their files are called."""
    return digest_json(sorted({span.document for span in spans}))


def read_content(path: Path) -> bytes:
    """Content of a file, decompressed, checked to be UTF-8. InputError naming file and byte."""
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if path.suffix in _COMPRESSED else raw
    except (OSError, EOFError, zlib.error) as e:
        raise InputError(f"cannot read {path}: {e}", field=str(path)) from e
    try:
        data.decode()
    except UnicodeDecodeError as e:
        raise InputError(f"{path} is not UTF-8 (byte {e.start})", field=str(path),
                         remedy="Convert it, or leave it out with a pattern that begins with '!'.") from e
    return data


def _pairs(ends: Iterable[int], start: int = 0) -> Iterator[tuple[int, int]]:
    """[start, e0), [e0, e1), ..."""
    for end in ends:
        yield start, end
        start = end


def _row_ends(data: bytes) -> Iterator[int]:
    """Ends of lines."""
    end = 0
    while end < len(data):
        found = data.find(b"\n", end)
        end = len(data) if found < 0 else found + 1
        yield end


def _cut_ends(data: bytes, start: int, stop: int, limit: int) -> Iterator[int]:
    """Ends of parts of [start, stop) of at most `limit` bytes: after a whole line, or within a line that is longer."""
    while stop - start > limit:
        found = data.rfind(b"\n", start, start + limit)
        end = found + 1 if found >= start else start + limit
        while data[end] & 0xC0 == 0x80:  # not inside a character
            end -= 1
        start = end
        yield end
    yield stop
