"""The GGUF container: typed metadata, tensors of a few kinds, every claim of a file checked before use.

Version 3, little-endian: magic, counts, metadata, tensor table, padding to 32 bytes, tensor data each padded to 32.
Source: the format's public description (ggml, docs/gguf.md). Shapes here are rows first; the file stores them reversed.
"""

from __future__ import annotations

import hashlib
import math
import mmap
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from tidemill.core.errors import IntegrityError, ManifestError
from tidemill.core.files import replacing
from tidemill.kernels.mxfp4 import BLOCK
from tidemill.model.tensor_bytes import tensor_bytes

Value = bool | int | float | str | list[int] | list[str]
"""A metadata value: bool, u32, f32, string, array of i32, array of strings."""
Progress = Callable[[str, int, int], None]
"""Called with a tensor's name, how much is done and how much there is (bytes on export, parameters on import), before
the tensor is worked on and once at the end with an empty name."""

MXFP4_BYTES = 1 + BLOCK // 2
"""One MXFP4 block in a file: the scale byte, then 32 codes."""
DIGESTS = "tidemill.tensor_sha256"
"""Our own key: SHA-256 of every tensor's bytes, in the order of the table. Other readers skip it."""
_MAGIC, _VERSION, _ALIGNMENT = b"GGUF", 3, 32
_MAX_TENSORS, _MAX_KEYS, _MAX_DIMS, _MAX_DEPTH = 1_000_000, 100_000, 4, 4


class TensorKind(IntEnum):
    """How the elements of a tensor are stored; ggml's numbers. Other kinds are not implemented."""

    F32 = 0
    F16 = 1
    BF16 = 30
    MXFP4 = 39


_DTYPES = {TensorKind.F32: torch.float32, TensorKind.F16: torch.float16, TensorKind.BF16: torch.bfloat16}
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_U32, _I32, _F32, _BOOL, _STRING, _ARRAY = 4, 5, 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorSlot:
    """One line of the tensor table. `shape` counts elements, rows first."""

    name: str
    shape: tuple[int, ...]
    kind: TensorKind

    @property
    def nbytes(self) -> int:
        count = math.prod(self.shape)
        if self.kind is TensorKind.MXFP4:
            return count // BLOCK * MXFP4_BYTES
        return count * _DTYPES[self.kind].itemsize


def write_gguf(path: Path, metadata: Mapping[str, Value], slots: Sequence[TensorSlot],
               content: Callable[[TensorSlot], Iterator[Tensor]], progress: Progress | None = None) -> int:
    """Write a file whole or not at all; returns its size in bytes.

    `content` gives the bytes of one slot as consecutive pieces (tensors of any dtype); one piece is held at a time.
    ValueError if the pieces of a slot are not as long as the slot. OSError naming the file if the disk is full.
    """
    total = sum(slot.nbytes for slot in slots)
    with replacing(path) as f:
        head = BytesIO()
        head.write(_MAGIC + struct.pack("<IQQ", _VERSION, len(slots), len(metadata) + 1))
        for key, value in metadata.items():
            _write_string(head, key)
            _write_value(head, value)
        _write_string(head, DIGESTS)
        digests_at = head.tell()
        _write_value(head, ["0" * 64] * len(slots))
        offset = 0
        for slot in slots:
            _write_string(head, slot.name)
            dims = slot.shape[::-1]
            head.write(struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, slot.kind, offset))
            offset += _padded(slot.nbytes)
        head.write(b"\0" * (-head.tell() % _ALIGNMENT))
        f.write(head.getvalue())
        done, digests = 0, list[str]()
        for slot in slots:
            if progress:
                progress(slot.name, done, total)
            digests.append(_write_pieces(f, slot, content(slot)))
            done += slot.nbytes
        size = f.tell()
        f.seek(digests_at)
        _write_value(f, digests)
        if progress:
            progress("", total, total)
    return size


def _write_pieces(f: BinaryIO, slot: TensorSlot, pieces: Iterator[Tensor]) -> str:
    digest, written = hashlib.sha256(), 0
    for piece in pieces:
        data = tensor_bytes(piece)
        digest.update(data)
        written += f.write(data)
    if written != slot.nbytes:
        raise ValueError(f"{slot.name}: {written} bytes for a slot of {slot.nbytes}")
    f.write(b"\0" * (_padded(written) - written))
    return digest.hexdigest()


def _padded(nbytes: int) -> int:
    return nbytes + -nbytes % _ALIGNMENT


def _write_string(f: BinaryIO, text: str) -> None:
    raw = text.encode()
    f.write(struct.pack("<Q", len(raw)) + raw)


def _write_value(f: BinaryIO, value: Value) -> None:
    if isinstance(value, bool):
        f.write(struct.pack("<I?", _BOOL, value))
    elif isinstance(value, int):
        f.write(struct.pack("<II", _U32, value))
    elif isinstance(value, float):
        f.write(struct.pack("<If", _F32, value))
    elif isinstance(value, str):
        f.write(struct.pack("<I", _STRING))
        _write_string(f, value)
    elif value and isinstance(value[0], int):
        f.write(struct.pack(f"<IIQ{len(value)}i", _ARRAY, _I32, len(value), *value))
    else:
        f.write(struct.pack("<IIQ", _ARRAY, _STRING, len(value)))
        for item in value:
            _write_string(f, str(item))


class GgufFile:
    """A mapped GGUF file. Tensors are views of the mapping and must not be written to."""

    def __init__(self, path: Path) -> None:
        """Map and check everything but the data. IntegrityError naming file and tensor if it is missing, cut short or
        malformed; ManifestError for a version, byte order or kind of tensor that is not implemented."""
        self.path = path
        try:
            with path.open("rb") as f:
                self._map = mmap.mmap(f.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError as e:
            raise IntegrityError(f"{path} is missing") from e
        except ValueError as e:
            raise IntegrityError(f"{path} is empty") from e
        reader = _Reader(path, self._map)
        tensors, keys = reader.header()
        self.metadata: dict[str, Any] = reader.metadata(keys)
        alignment = self.metadata.get("general.alignment", _ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment % 8:
            raise IntegrityError(f"{path}: general.alignment = {alignment!r}: expected a multiple of 8")
        self._slots = reader.table(tensors, alignment)
        self._digests = self._listed_digests()

    @property
    def slots(self) -> dict[str, TensorSlot]:
        """Every tensor by name, in the order of the table."""
        return {name: slot for name, (slot, _) in self._slots.items()}

    def tensor(self, name: str) -> Tensor:
        """A view of one tensor: its values, or for MXFP4 the raw blocks u8 [..., K/32, 17]. ManifestError if there is
        no such tensor; IntegrityError if its bytes are not what the file's own digests say."""
        try:
            slot, begin = self._slots[name]
        except KeyError:
            raise ManifestError(f"{self.path} holds no tensor {name}") from None
        if name in self._digests and self._sha256(begin, slot.nbytes) != self._digests[name]:
            raise IntegrityError(f"{self.path}: the bytes of {name} are not what {DIGESTS} says",
                                 remedy="Copy or convert the file again.")
        if slot.kind is TensorKind.MXFP4:
            raw = torch.frombuffer(self._map, dtype=torch.uint8, count=slot.nbytes, offset=begin)
            return raw.view(*slot.shape[:-1], slot.shape[-1] // BLOCK, MXFP4_BYTES)
        count = math.prod(slot.shape)
        return torch.frombuffer(self._map, dtype=_DTYPES[slot.kind], count=count, offset=begin).view(slot.shape)

    def _sha256(self, begin: int, nbytes: int) -> str:
        with memoryview(self._map) as view, view[begin : begin + nbytes] as part:
            return hashlib.sha256(part).hexdigest()

    def _listed_digests(self) -> dict[str, str]:
        listed = self.metadata.get(DIGESTS)
        if listed is None:
            return {}
        if not isinstance(listed, list) or len(listed) != len(self._slots):
            raise IntegrityError(f"{self.path}: {DIGESTS} does not list one digest for each of {len(self._slots)} "
                                 "tensors")
        return dict(zip(self._slots, listed, strict=True))


class _Reader:
    """A cursor over the head of a file that refuses to leave it."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def header(self) -> tuple[int, int]:
        """(tensors, keys)."""
        if self._take(4) != _MAGIC:
            raise ManifestError(f"{self._path} is no GGUF file: it does not begin with GGUF")
        (version,) = self._unpack("<I")
        if version != _VERSION:
            raise ManifestError(f"{self._path} has GGUF version {version}, expected {_VERSION} (little-endian)",
                                remedy="Convert it with a current llama.cpp.")
        tensors, keys = self._unpack("<QQ")
        if tensors > _MAX_TENSORS or keys > _MAX_KEYS:
            raise IntegrityError(f"{self._path} is corrupt: it claims {tensors} tensors and {keys} keys")
        return tensors, keys

    def metadata(self, keys: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string("a metadata key")
            (kind,) = self._unpack("<I")
            if key in found:
                raise IntegrityError(f"{self._path} is corrupt: the key {key} is listed twice")
            found[key] = self._value(key, kind, 0)
        return found

    def table(self, tensors: int, alignment: int) -> dict[str, tuple[TensorSlot, int]]:
        """Slot and first byte of every tensor."""
        rows: dict[str, tuple[TensorSlot, int]] = {}
        for _ in range(tensors):
            name = self._string("a tensor's name")
            (count,) = self._unpack("<I")
            if not 1 <= count <= _MAX_DIMS:
                raise IntegrityError(f"{self._path}: {name} has {count} dimensions, expected 1 to {_MAX_DIMS}")
            *dims, number, offset = self._unpack(f"<{count}QIQ")
            try:
                kind = TensorKind(number)
            except ValueError:
                known = ", ".join(k.name for k in TensorKind)
                raise ManifestError(
                    f"{self._path}: {name} is stored as ggml type {number}, expected {known}",
                    remedy="Convert the model without quantising (for example with --outtype bf16).") from None
            if kind is TensorKind.MXFP4 and dims[0] % BLOCK:
                raise IntegrityError(f"{self._path}: {name} is MXFP4 with rows of {dims[0]}, not a multiple of {BLOCK}")
            if name in rows or offset % alignment or 0 in dims:
                raise IntegrityError(f"{self._path}: the table entry of {name} is corrupt")
            rows[name] = TensorSlot(name, tuple(dims[::-1]), kind), offset
        start = self._at + -self._at % alignment
        size = len(self._data)
        for name, (slot, offset) in rows.items():
            if start + offset + slot.nbytes > size:
                raise IntegrityError(f"{self._path} is cut short: {name} ends at byte {start + offset + slot.nbytes} "
                                     f"of {size}", remedy="Copy or convert the file again.")
        return {name: (slot, start + offset) for name, (slot, offset) in rows.items()}

    def _value(self, key: str, kind: int, depth: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind])[0]
        if kind == _STRING:
            return self._string(key)
        if kind != _ARRAY or depth == _MAX_DEPTH:
            raise IntegrityError(f"{self._path} is corrupt: the key {key} has a value of unknown type {kind}")
        item, count = self._unpack("<IQ")
        if count > len(self._data):
            raise IntegrityError(f"{self._path} is cut short or corrupt: the key {key} claims {count} entries")
        if item in _SCALARS:
            return list(self._unpack(f"<{count}{_SCALARS[item][1]}"))
        return [self._value(key, item, depth + 1) for _ in range(count)]

    def _string(self, what: str) -> str:
        (length,) = self._unpack("<Q")
        try:
            return self._take(length).decode()
        except UnicodeDecodeError as e:
            raise IntegrityError(f"{self._path} is corrupt: the text of {what} is no UTF-8") from e

    def _unpack(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(form, self._take(struct.calcsize(form)))

    def _take(self, length: int) -> bytes:
        end = self._at + length
        if end > len(self._data):
            raise IntegrityError(f"{self._path} is cut short: its head goes on after byte {len(self._data)}",
                                 remedy="Copy or convert the file again.")
        raw = self._data[self._at : end]
        self._at = end
        return raw
