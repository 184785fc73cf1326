"""Tensors as bytes: digests, manifest entries, and a safetensors file whose every claim is checked before use.

Bytes are little-endian, C-contiguous, in the stored dtype. Views come from a copy-on-write mapping: nothing is copied
until somebody looks, and a write by mistake could not reach the file. Writing streams: shapes first, then the values.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import mmap
import os
import struct
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tidemill.core.digests import PREFIX, digest_bytes
from tidemill.core.errors import IntegrityError, ManifestError
from tidemill.core.files import replacing
from tidemill.core.manifest import TensorEntry

_FORMAT_NAMES = {"float32": "F32", "bfloat16": "BF16", "uint8": "U8", "int64": "I64", "float16": "F16"}
_TORCH_NAMES = {short: name for name, short in _FORMAT_NAMES.items()}
_MAX_HEADER = 100_000_000


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.float32` -> `float32`."""
    return str(dtype).removeprefix("torch.")


def tensor_bytes(x: Tensor) -> memoryview:
    """The bytes of x (of a contiguous copy if it is none); shares memory where it can."""
    array = x.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(cast("Any", array))


def tensor_digest(x: Tensor) -> str:
    """SHA-256 of `tensor_bytes`."""
    return digest_bytes(tensor_bytes(x))


def tensor_entry(name: str, x: Tensor) -> TensorEntry:
    """The manifest line of one tensor."""
    nbytes = x.numel() * x.element_size()
    return TensorEntry(name, dtype_name(x.dtype), tuple(x.shape), nbytes, tensor_digest(x))


@dataclass(frozen=True, slots=True)
class TensorPlan:
    """A tensor to be written: name, torch dtype name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * getattr(torch, self.dtype).itemsize


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What `stream_tensors` wrote: SHA-256 of the whole file, its size, and a manifest line per tensor."""

    sha256: str
    nbytes: int
    entries: tuple[TensorEntry, ...]


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a safetensors file in the given order: whole or not at all (written beside, synced, renamed)."""
    listed = dict(tensors)
    plan = [TensorPlan(name, dtype_name(x.dtype), tuple(x.shape)) for name, x in listed.items()]
    stream_tensors(path, plan, lambda t: (listed[t.name],))


def stream_tensors(path: Path, plan: Sequence[TensorPlan],
                   pieces: Callable[[TensorPlan], Iterable[Tensor]]) -> WrittenFile:
    """Write a safetensors file of `plan`, whole or not at all, holding one piece at a time.

    `pieces(tensor)` is asked for one tensor after the other in the order of `plan` and yields its values in parts that
    follow one another in memory order, each in the planned dtype. AssertionError if they do not add up to its size.
    """
    raw = _header_of(plan)
    whole, entries = hashlib.sha256(raw), list[TensorEntry]()
    with replacing(path) as f:
        f.write(raw)
        for t in plan:
            own, size = hashlib.sha256(), 0
            for piece in pieces(t):
                assert dtype_name(piece.dtype) == t.dtype, f"{t.name} is planned as {t.dtype}"
                data = tensor_bytes(piece)
                for sink in (own.update, whole.update, f.write):
                    sink(data)
                size += len(data)
                del piece, data  # before the next one is made: two large tensors would be held otherwise
            assert size == t.nbytes, f"{t.name} is planned with {t.nbytes} bytes and got {size}"
            entries.append(TensorEntry(t.name, t.dtype, t.shape, size, f"{PREFIX}{own.hexdigest()}"))
    return WrittenFile(f"{PREFIX}{whole.hexdigest()}", len(raw) + sum(t.nbytes for t in plan), tuple(entries))


def _header_of(plan: Sequence[TensorPlan]) -> bytes:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for t in plan:
        end = offset + t.nbytes
        header[t.name] = {"dtype": _FORMAT_NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 64)
    return struct.pack("<Q", len(raw)) + raw


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """An open safetensors file. `tensor` and `stack` are views of a mapping that lives as long as this object or any
    tensor from it; `read_into` copies without mapping, so that what was read costs no memory but its destination."""

    def __init__(self, path: Path) -> None:
        """Open and check the header. IntegrityError naming file and tensor if it is missing, cut short or malformed."""
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as e:
            raise IntegrityError(f"{path} is missing") from e
        weakref.finalize(self, os.close, self._fd)
        self.nbytes = os.fstat(self._fd).st_size
        self.header_digest, self._data, self._entries = _read_header(path, self._fd, self.nbytes)
        self._map: mmap.mmap | None = None

    def names(self) -> list[str]:
        """In file order."""
        return list(self._entries)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(torch dtype name, shape). ManifestError if there is no such tensor."""
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def tensor(self, name: str) -> Tensor:
        """A view of one tensor; treat it as read-only. ManifestError if there is no such tensor."""
        entry = self._entry(name)
        return self._view(entry.dtype, entry.begin, entry.end).view(entry.shape)

    def stack(self, names: list[str]) -> Tensor:
        """Tensors of one dtype and shape stacked on a new first axis: a view if they lie side by side in this order."""
        entries = [self._entry(name) for name in names]
        first = entries[0]
        adjacent = all(a.end == b.begin for a, b in itertools.pairwise(entries))
        if adjacent:
            return self._view(first.dtype, first.begin, entries[-1].end).view(len(names), *first.shape)
        return torch.stack([self.tensor(name) for name in names])

    def read_into(self, name: str, out: Tensor, *, start: int = 0) -> None:
        """Copy `out.numel()` elements of a tensor, beginning with element `start`, into `out` (contiguous, same dtype).
        IntegrityError if the file has become shorter."""
        entry = self._entry(name)
        assert dtype_name(out.dtype) == entry.dtype, f"{name} is {entry.dtype}"
        assert out.is_contiguous(), f"the destination of {name} is not contiguous"
        begin = entry.begin + start * out.element_size()
        data = tensor_bytes(out)
        assert begin + len(data) <= entry.end, f"{name} has fewer elements than are asked for"
        done = 0
        while done < len(data):
            got = os.preadv(self._fd, [data[done:]], self._data + begin + done)
            if got == 0:
                raise IntegrityError(f"{self.path} was cut short while it was read: {name} is incomplete")
            done += got

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise ManifestError(f"{self.path} holds no tensor {name}") from None

    def _view(self, dtype: str, begin: int, end: int) -> Tensor:
        kind = getattr(torch, dtype)
        if begin == end:
            return torch.empty(0, dtype=kind)
        if self._map is None:
            self._map = mmap.mmap(self._fd, 0, access=mmap.ACCESS_COPY)
        return torch.frombuffer(self._map, dtype=kind, count=(end - begin) // kind.itemsize, offset=self._data + begin)


def _read_header(path: Path, fd: int, size: int) -> tuple[str, int, dict[str, _Entry]]:
    """(digest of the header, where the data begins, tensors by name)."""
    if size == 0:
        raise IntegrityError(f"{path} is empty")
    if size < 8:
        raise IntegrityError(f"{path} is cut short: {size} bytes")
    (length,) = struct.unpack("<Q", os.pread(fd, 8, 0))
    if length > min(size - 8, _MAX_HEADER):
        raise IntegrityError(f"{path} is cut short or corrupt: its header claims {length} bytes of {size}")
    raw = os.pread(fd, length, 8)
    try:
        header = json.loads(raw, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as e:
        raise IntegrityError(f"{path} has a corrupt header: {e}") from e
    if not isinstance(header, dict):
        raise IntegrityError(f"{path} has a corrupt header: not a mapping")
    start = 8 + length
    entries: dict[str, _Entry] = {}
    for name, entry in cast("Mapping[str, Any]", header).items():
        if name != "__metadata__":
            entries[name] = _parse_entry(path, name, entry, size - start)
    ordered = sorted(entries, key=lambda name: (entries[name].begin, entries[name].end))
    for before, after in itertools.pairwise(ordered):
        if entries[after].begin < entries[before].end:
            raise IntegrityError(f"{path}: {before} and {after} overlap")
    return digest_bytes(raw), start, entries


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is listed twice")
    return found


def _parse_entry(path: Path, name: str, raw: Any, available: int) -> _Entry:
    try:
        dtype, shape = _TORCH_NAMES[raw["dtype"]], tuple(_count(n) for n in raw["shape"])
        begin, end = (_count(n) for n in raw["data_offsets"])
    except (KeyError, TypeError, ValueError) as e:
        raise IntegrityError(f"{path}: the header entry of {name} is corrupt ({e!r})") from e
    if begin > end:
        raise IntegrityError(f"{path}: the offsets of {name} are corrupt")
    if end > available:
        raise IntegrityError(f"{path} is cut short: {name} ends at byte {end} of {available}")
    if math.prod(shape) * getattr(torch, dtype).itemsize != end - begin:
        raise IntegrityError(f"{path}: {name} has {end - begin} bytes, which do not fit shape {list(shape)} of {dtype}")
    return _Entry(dtype, shape, begin, end)


def _count(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value
