"""The base store: round trip, the file format against the safetensors library, and every kind of damage."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tidemill.core.errors import ConfigError, IntegrityError, ManifestError
from tidemill.kernels import mxfp4
from tidemill.model.base import MANIFEST, WEIGHTS, BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.presets import tiny
from tidemill.model.tensor_bytes import TensorFile, write_tensors

STACK = "model.layers.1.block_sparse_moe.experts.w1"
PART = "model.layers.1.block_sparse_moe.experts.3.w1.weight_packed"


@pytest.fixture
def model() -> CausalLM:
    return CausalLM(tiny(), seed=1)


@pytest.fixture
def folder(tmp_path: Path, model: CausalLM) -> Path:
    write_base(tmp_path / "base", model)
    return tmp_path / "base"


def test_round_trip(folder: Path, model: CausalLM) -> None:
    store = BaseStore.open(folder)
    assert store.config == tiny()
    for name, x in model.state_dict().items():
        want = mxfp4.decode(*mxfp4.encode(x)) if ".experts.w" in name else x
        assert torch.equal(store.decoded(name), want), name
    packed, scale = store.packed(STACK)
    assert torch.equal(packed, mxfp4.encode(model.state_dict()[STACK])[0])
    assert (packed.dtype, packed.shape, scale.shape) == (torch.uint8, (8, 32, 16), (8, 32, 1))
    assert store.verify() == len(store.file_names()) == len(store.manifest.tensors)
    assert store.verify([PART]) == 1


def test_experts_map_as_one_view(folder: Path) -> None:
    store = BaseStore.open(folder)
    first, second = store.packed(STACK)[0], store.packed(STACK)[0]
    assert first.data_ptr() == second.data_ptr()


def test_the_trainers_model_computes_on_the_stored_bytes_and_is_frozen(folder: Path, model: CausalLM) -> None:
    frozen = BaseStore.open(folder).model()
    assert not any(p.requires_grad for p in frozen.parameters())
    ids = torch.randint(0, 96, (2, 17))
    model.set_quantization("weights")
    with torch.no_grad():
        assert torch.equal(frozen(ids), model(ids))


def test_digest_is_of_content_not_of_place_or_time(folder: Path, model: CausalLM, tmp_path: Path) -> None:
    again = write_base(tmp_path / "other", model)
    assert again.base_digest == BaseStore.open(folder).digest
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1.0
    assert write_base(tmp_path / "third", model).base_digest != again.base_digest


def test_writing_over_a_base_replaces_it(folder: Path) -> None:
    manifest = write_base(folder, CausalLM(tiny(), seed=2))
    assert BaseStore.open(folder).digest == manifest.base_digest
    assert {p.name for p in folder.iterdir() if p.suffix != ".py"} == {MANIFEST, WEIGHTS, "config.json"}


def test_the_safetensors_library_reads_the_file(folder: Path, model: CausalLM) -> None:
    with safe_open(folder / WEIGHTS, "pt") as f:
        assert torch.equal(f.get_tensor("lm_head.weight"), model.lm_head.weight)
        assert f.get_tensor(PART).dtype is torch.uint8


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    tensors = {"b": torch.randn(3, 4), "a": torch.arange(6).to(torch.uint8), "c": torch.randn(2, 2).bfloat16()}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "x.safetensors")
    assert sorted(file.names()) == ["a", "b", "c"]
    for name, x in tensors.items():
        assert torch.equal(file.tensor(name), x)
    assert torch.equal(file.stack(["b", "b"]), torch.stack([tensors["b"]] * 2))


def test_unquantised_experts(tmp_path: Path) -> None:
    data = tiny().to_json()
    del data["text_config"]["quantization_config"]
    config = type(tiny()).from_json(data)
    model = CausalLM(config, seed=1)
    write_base(tmp_path, model)
    store = BaseStore.open(tmp_path)
    assert torch.equal(store.tensor(STACK), model.state_dict()[STACK])
    with pytest.raises(ManifestError, match="not stored packed"):
        store.packed(STACK)


def test_asking_for_the_wrong_form(folder: Path) -> None:
    store = BaseStore.open(folder)
    with pytest.raises(ManifestError, match="stored packed"):
        store.tensor(STACK)
    with pytest.raises(ManifestError, match="no tensor nonsense"):
        store.decoded("nonsense")
    with pytest.raises(ManifestError, match="lists no tensor nonsense"):
        store.verify(["nonsense"])


def flip_byte(folder: Path) -> None:
    path = folder / WEIGHTS
    begin = _offset(path, PART)
    data = bytearray(path.read_bytes())
    data[begin + 5] ^= 1
    path.write_bytes(data)


def _offset(path: Path, name: str) -> int:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return 8 + length + json.loads(data[8 : 8 + length])[name]["data_offsets"][0]


def edit_header(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / WEIGHTS
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


def edit_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    data = json.loads((folder / MANIFEST).read_text())
    change(data)
    (folder / MANIFEST).write_text(json.dumps(data))


def truncate(folder: Path, size: int) -> None:
    os.truncate(folder / WEIGHTS, size)


def reshape(header: dict[str, Any]) -> None:
    header["lm_head.weight"]["shape"].reverse()


def misfit(header: dict[str, Any]) -> None:
    header["lm_head.weight"]["shape"][0] += 1


def rename(header: dict[str, Any]) -> None:
    header["lm_head.wait"] = header.pop("lm_head.weight")


def extra(header: dict[str, Any]) -> None:
    header["extra.weight"] = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "one flipped bit": (flip_byte, IntegrityError, PART),
    "cut off in the data": (lambda f: truncate(f, (f / WEIGHTS).stat().st_size - 1), IntegrityError, "cut short"),
    "cut off in the header": (lambda f: truncate(f, 100), IntegrityError, "cut short or corrupt"),
    "seven bytes": (lambda f: truncate(f, 7), IntegrityError, "cut short"),
    "empty": (lambda f: truncate(f, 0), IntegrityError, "empty"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), IntegrityError, "missing"),
    "header is no JSON": (lambda f: (f / WEIGHTS).write_bytes((4).to_bytes(8, "little") + b"{{{{"), IntegrityError,
                          "corrupt header"),
    "no manifest": (lambda f: (f / MANIFEST).unlink(), ManifestError, "cannot read"),
    "no configuration": (lambda f: (f / "config.json").unlink(), ConfigError, "cannot read"),
    "reshaped tensor": (lambda f: edit_header(f, reshape), ManifestError, "lm_head.weight is float32 [48, 96]"),
    "shape and bytes disagree": (lambda f: edit_header(f, misfit), IntegrityError, "do not fit shape"),
    "missing tensor": (lambda f: edit_header(f, lambda h: h.pop("lm_head.weight")), ManifestError,
                       "lm_head.weight is missing"),
    "renamed tensor": (lambda f: edit_header(f, rename), ManifestError, "lm_head.weight is missing"),
    "unexpected tensor": (lambda f: edit_header(f, extra), ManifestError, "extra.weight is unexpected"),
    "manifest of another base": (lambda f: edit_manifest(f, lambda m: m.update(base_digest="sha256:0")), ManifestError,
                                 "base_digest"),
    "manifest without a digest": (lambda f: edit_manifest(f, lambda m: m.pop("base_digest")), ManifestError,
                                  "malformed"),
    "manifest of another schema": (lambda f: edit_manifest(f, lambda m: m.update(schema="x/2")), ManifestError,
                                   "schema"),
    "manifest with a changed entry": (lambda f: edit_manifest(f, lambda m: m["tensors"][0].update(sha256="sha256:0")),
                                      ManifestError, "does not match base_digest"),
    "another configuration": (lambda f: tiny(95).write(f), ManifestError, "not the configuration"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_and_named(folder: Path, kind: str) -> None:
    damage, error, message = DAMAGE[kind]
    damage(folder)
    with pytest.raises(error) as e:
        BaseStore.open(folder)
    assert message in str(e.value)


def test_verification_may_wait(folder: Path) -> None:
    flip_byte(folder)
    store = BaseStore.open(folder, verify=False)
    assert store.verify(["lm_head.weight"]) == 1
    with pytest.raises(IntegrityError, match="w1"):
        store.verify([PART])


def test_a_failed_write_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tensors(tmp_path / "x.safetensors", [("a", torch.zeros(4))])
    before = (tmp_path / "x.safetensors").read_bytes()

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        write_tensors(tmp_path / "x.safetensors", [("a", torch.ones(4000))])
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]
    assert (tmp_path / "x.safetensors").read_bytes() == before


def test_writes_to_tensors_do_not_reach_the_file(folder: Path) -> None:
    before = (folder / WEIGHTS).read_bytes()
    BaseStore.open(folder).tensor("lm_head.weight").zero_()
    assert (folder / WEIGHTS).read_bytes() == before
