"""Tensors as bytes: digests, manifest entries, and a safetensors file whose every claim is checked before use.

Bytes are little-endian, C-contiguous, in the stored dtype. Reading maps the file copy-on-write: tensors are views,
nothing is copied until somebody looks, and a write by mistake could not reach the file.
"""

from __future__ import annotations

import itertools
import json
import math
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from tidemill.core.digests import digest_bytes
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


def write_tensors(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a safetensors file in the given order: whole or not at all (written beside, synced, renamed)."""
    listed = list(tensors)
    stream_tensors(path, [(name, dtype_name(x.dtype), tuple(x.shape)) for name, x in listed], (x for _, x in listed))


def stream_tensors(path: Path, listed: Sequence[tuple[str, str, tuple[int, ...]]],
                   tensors: Iterable[Tensor]) -> list[TensorEntry]:
    """Write a safetensors file of `listed` (name, dtype, shape) from tensors that come one by one in that order: whole
    or not at all. Returns the manifest lines. ValueError if a tensor is not what was listed, or one is missing."""
    header: dict[str, Any] = {}
    offset = 0
    for name, dtype, shape in listed:
        end = offset + math.prod(shape) * getattr(torch, dtype).itemsize
        header[name] = {"dtype": _FORMAT_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 64)
    entries: list[TensorEntry] = []
    with replacing(path) as f:
        f.write(struct.pack("<Q", len(raw)) + raw)
        for (name, dtype, shape), x in zip(listed, tensors, strict=True):
            if (dtype_name(x.dtype), tuple(x.shape)) != (dtype, shape):
                raise ValueError(f"{name} is {dtype_name(x.dtype)} {list(x.shape)}, listed as {dtype} {list(shape)}")
            f.write(tensor_bytes(x))
            entries.append(tensor_entry(name, x))
    return entries


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorFile:
    """A mapped safetensors file. The mapping lives as long as this object or any tensor from it."""

    def __init__(self, path: Path) -> None:
        """Map and check the header. IntegrityError naming file and tensor if it is missing, cut short or malformed."""
        self.path = path
        try:
            with path.open("rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError as e:
            raise IntegrityError(f"{path} is missing") from e
        except ValueError as e:
            raise IntegrityError(f"{path} is empty") from e
        self._data, self._entries = _parse_header(path, self._map)

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

    def _entry(self, name: str) -> _Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise ManifestError(f"{self.path} holds no tensor {name}") from None

    def _view(self, dtype: str, begin: int, end: int) -> Tensor:
        kind = getattr(torch, dtype)
        if begin == end:
            return torch.empty(0, dtype=kind)
        return torch.frombuffer(self._map, dtype=kind, count=(end - begin) // kind.itemsize, offset=self._data + begin)


def _parse_header(path: Path, data: mmap.mmap) -> tuple[int, dict[str, _Entry]]:
    size = len(data)
    if size < 8:
        raise IntegrityError(f"{path} is cut short: {size} bytes")
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(size - 8, _MAX_HEADER):
        raise IntegrityError(f"{path} is cut short or corrupt: its header claims {length} bytes of {size}")
    try:
        header = json.loads(data[8 : 8 + length])
    except ValueError as e:
        raise IntegrityError(f"{path} has a corrupt header: {e}") from e
    if not isinstance(header, dict):
        raise IntegrityError(f"{path} has a corrupt header: not a mapping")
    start = 8 + length
    entries: dict[str, _Entry] = {}
    for name, raw in cast("Mapping[str, Any]", header).items():
        if name != "__metadata__":
            entries[name] = _parse_entry(path, name, raw, size - start)
    return start, entries


def _parse_entry(path: Path, name: str, raw: Any, available: int) -> _Entry:
    try:
        dtype, shape = _TORCH_NAMES[raw["dtype"]], tuple(int(n) for n in raw["shape"])
        begin, end = (int(n) for n in raw["data_offsets"])
    except (KeyError, TypeError, ValueError) as e:
        raise IntegrityError(f"{path}: the header entry of {name} is corrupt ({e!r})") from e
    if not 0 <= begin <= end:
        raise IntegrityError(f"{path}: the offsets of {name} are corrupt")
    if end > available:
        raise IntegrityError(f"{path} is cut short: {name} ends at byte {end} of {available}")
    if math.prod(shape) * getattr(torch, dtype).itemsize != end - begin:
        raise IntegrityError(f"{path}: {name} has {end - begin} bytes, which do not fit shape {list(shape)} of {dtype}")
    return _Entry(dtype, shape, begin, end)
