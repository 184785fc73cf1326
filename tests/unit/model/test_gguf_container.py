"""The GGUF container against the gguf package, in both directions, and every kind of damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from tidemill.core.errors import IntegrityError, ManifestError, TidemillError
from tidemill.model.gguf.container import DIGESTS, GgufFile, TensorKind, TensorSlot, Value, write_gguf

METADATA: dict[str, Value] = {
    "general.architecture": "kimi-k3", "a.bool": True, "a.count": 7, "a.scale": 1e-5, "a.text": "grüße",
    "a.layers": [0, 0, 1, -1], "a.words": ["x", "", "Ġy"],
}
TENSORS: dict[str, tuple[TensorKind, Tensor]] = {
    "first.weight": (TensorKind.F32, torch.arange(15.0).view(3, 5)),
    "second.bias": (TensorKind.F32, torch.tensor([1.5])),
    "third.weight": (TensorKind.BF16, torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(1)).bfloat16()),
    "packed.weight": (TensorKind.MXFP4, torch.arange(2 * 2 * 17).to(torch.uint8).view(2, 2, 17)),
}
PADDING = 28
"""Bytes behind the last tensor."""


def slot_of(name: str) -> TensorSlot:
    kind, x = TENSORS[name]
    shape = (*x.shape[:-2], x.shape[-2] * 32) if kind is TensorKind.MXFP4 else tuple(x.shape)
    return TensorSlot(name, shape, kind)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    target = tmp_path / "m.gguf"
    size = write_gguf(target, METADATA, [slot_of(n) for n in TENSORS], lambda s: iter(TENSORS[s.name][1]))
    assert size == target.stat().st_size
    return target


def test_the_gguf_package_reads_what_we_write(path: Path) -> None:
    reader = gguf.GGUFReader(path)
    for key, value in METADATA.items():
        found = reader.fields[key].contents()
        assert found == (pytest.approx(value) if isinstance(value, float) else value), key
    assert [t.name for t in reader.tensors] == list(TENSORS)
    for t in reader.tensors:
        kind, x = TENSORS[t.name]
        assert t.tensor_type == gguf.GGMLQuantizationType(kind)
        assert [int(n) for n in t.shape[::-1]] == list(slot_of(t.name).shape)
        assert np.asarray(t.data).tobytes() == x.view(torch.uint8).numpy().tobytes(), t.name


def test_we_read_what_the_gguf_package_writes(tmp_path: Path) -> None:
    path = tmp_path / "theirs.gguf"
    writer = gguf.GGUFWriter(path, "kimi-k3")
    writer.add_array("x.floats", [0.5, 2.0])
    writer.add_uint64("x.big", 1 << 40)
    writer.add_custom_alignment(64)
    a = np.arange(12, dtype=np.float32).reshape(3, 4)
    writer.add_tensor("a", a)
    writer.add_tensor("half", a.astype(np.float16))
    packed = np.arange(34, dtype=np.uint8).reshape(1, 34)
    writer.add_tensor("p", packed, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    assert file.metadata["general.architecture"] == "kimi-k3"
    assert file.metadata["x.floats"] == [0.5, 2.0]
    assert file.metadata["x.big"] == 1 << 40
    assert torch.equal(file.tensor("a"), torch.from_numpy(a))
    assert torch.equal(file.tensor("half"), torch.from_numpy(a).half())
    assert file.slots["p"] == TensorSlot("p", (1, 64), TensorKind.MXFP4)
    assert torch.equal(file.tensor("p"), torch.from_numpy(packed).view(1, 2, 17))


def test_our_own_round_trip(path: Path) -> None:
    file = GgufFile(path)
    assert {k: v for k, v in file.metadata.items() if k != DIGESTS} == METADATA | {"a.scale": pytest.approx(1e-5)}
    assert list(file.slots) == list(TENSORS)
    for name, (_, x) in TENSORS.items():
        assert torch.equal(file.tensor(name), x)


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    whole = path.read_bytes()
    for length in [0, 1, 7, 23, *range(24, len(whole) - PADDING, 29), len(whole) - PADDING - 1]:
        path.write_bytes(whole[:length])
        with pytest.raises(TidemillError) as caught:
            GgufFile(path)
        assert str(path) in str(caught.value)


def _odd_offset(raw: bytes) -> bytes:
    at = raw.index(b"second.bias") + len("second.bias") + 4 + 8 + 4
    return raw[:at] + struct.pack("<Q", 5) + raw[at + 8 :]


@pytest.mark.parametrize(("damage", "error", "words"), [
    (lambda raw: b"GGML" + raw[4:], ManifestError, "no GGUF file"),
    (lambda raw: raw[:4] + struct.pack("<I", 2) + raw[8:], ManifestError, "version 2"),
    (lambda raw: raw[:8] + struct.pack("<Q", 1 << 60) + raw[16:], IntegrityError, "corrupt"),
    (lambda raw: raw.replace(b"a.bool", b"a.text"), IntegrityError, "twice"),
    (lambda raw: raw.replace(b"second.bias", b"second.b\xffas"), IntegrityError, "UTF-8"),
    (_odd_offset, IntegrityError, "second.bias"),
])
def test_a_damaged_head_is_refused(path: Path, damage: Callable[[bytes], bytes], error: type[Exception],
                                   words: str) -> None:
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(error, match=words):
        GgufFile(path)


def test_another_kind_of_tensor_is_refused_by_name(path: Path) -> None:
    raw = path.read_bytes()
    at = raw.index(b"first.weight") + len("first.weight") + 4 + 16
    path.write_bytes(raw[:at] + struct.pack("<I", 12) + raw[at + 4 :])
    with pytest.raises(ManifestError, match=r"first\.weight is stored as ggml type 12.*without quantising"):
        GgufFile(path)


def test_a_changed_byte_of_a_tensor_is_found(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-PADDING - 5] ^= 1
    path.write_bytes(raw)
    file = GgufFile(path)
    file.tensor("first.weight")
    with pytest.raises(IntegrityError, match=r"packed\.weight"):
        file.tensor("packed.weight")


def test_a_missing_file_and_a_missing_tensor(path: Path) -> None:
    with pytest.raises(ManifestError, match="no tensor nothing"):
        GgufFile(path).tensor("nothing")
    with pytest.raises(IntegrityError, match="missing"):
        GgufFile(path.with_name("no.gguf"))


def test_an_error_while_writing_leaves_the_old_file(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"first\.weight: 4 bytes for a slot of 60"):
        write_gguf(path, METADATA, [slot_of("first.weight")], lambda _: iter([torch.zeros(1)]))
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_progress_counts_bytes(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    slots = [slot_of(n) for n in TENSORS]
    write_gguf(tmp_path / "m.gguf", {}, slots, lambda s: iter(TENSORS[s.name][1]), lambda *row: seen.append(row))
    assert [row[0] for row in seen] == [*TENSORS, ""]
    assert [row[1] for row in seen] == [0, 60, 64, 112, 180]
    assert {row[2] for row in seen} == {180}
