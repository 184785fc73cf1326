"""GGUF to model folder, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tidemill.core.errors import InputError, IntegrityError, ManifestError
from tidemill.model.base import BaseManifest, write_base_tensors
from tidemill.model.config import ModelConfig, TextConfig
from tidemill.model.gguf import vocabulary
from tidemill.model.gguf.container import GgufFile, Progress, TensorKind, TensorSlot
from tidemill.model.gguf.metadata import from_metadata
from tidemill.model.gguf.tensors import Mapped, codes_of, from_gguf, mapped_by_source, mapped_tensors, scales_of
from tidemill.model.inventory import TensorSpec, inventory


def import_gguf(path: Path, folder: Path, *, dtype: Literal["float32", "bfloat16"] | None = None,
                tokenizer: bool = True, progress: Progress | None = None) -> BaseManifest:
    """Write the model of a GGUF file of architecture `kimi-k3` or `kimi-linear` as a model folder.

    `dtype` is what the model computes in (None: bfloat16 if the embedding is BF16, else float32); weights that it
    cannot hold are rounded. A mixture's score becomes its query, its norm gain 1: the same function. MXFP4 experts
    stay packed, byte for byte. `tokenizer` writes the file's tokenizer too, if it has one. One tensor is held at a
    time; the manifest is written last, so a cut-off import is never taken for a model.

    Raises IntegrityError naming file and tensor if the file is missing, cut short or corrupt, or holds NaN;
    ManifestError if it is of another architecture, or a tensor is missing, unexpected, mis-shaped or quantised
    otherwise; InputError if `folder` holds a model already.
    """
    if (folder / "config.json").exists():
        raise InputError(f"{folder} holds a model already", field="folder", remedy="Name a new folder.")
    file = GgufFile(path)
    slots = file.slots
    config = from_metadata(file, dtype=dtype or _dtype_of(slots), quantized=_quantized(path, slots), names=set(slots))
    _check_tensors(path, config.text_config, slots)
    words = vocabulary.from_metadata(file) if tokenizer else None
    if words is not None and words.size > config.text_config.vocab_size:
        raise ManifestError(f"{path}: the tokenizer has {words.size} tokens and the model "
                            f"{config.text_config.vocab_size}", remedy="Import it without its tokenizer.")
    folder.mkdir(parents=True, exist_ok=True)
    if words is not None:
        words.save(folder)
    return write_base_tensors(folder, config, _Values(file, config, progress).tensors())


@dataclass
class _Values:
    """The tensors of a model folder, made from a GGUF file one at a time."""

    file: GgufFile
    config: ModelConfig
    progress: Progress | None

    def tensors(self) -> Iterator[Tensor]:
        """In the order of tidemill.model.names.storage_order."""
        c = self.config.text_config
        by_source = mapped_by_source(c)
        specs = list(inventory(c).values())
        total = sum(spec.numel for spec in specs)
        done = 0
        for spec in specs:
            if self.progress:
                self.progress(spec.name, done, total)
            if spec.is_expert:
                yield from self._experts(by_source[spec.name][0], spec)
            else:
                yield from_gguf(c, spec, by_source, self._stored).to(getattr(torch, spec.dtype))
            done += spec.numel
        if self.progress:
            self.progress("", total, total)

    def _stored(self, name: str) -> Tensor:
        return self._finite(name, self.file.tensor(name))

    def _finite(self, name: str, x: Tensor) -> Tensor:
        if not bool(x.isfinite().all()):
            raise IntegrityError(f"{self.file.path}: {name} holds NaN or infinity",
                                 remedy="Look at the model it was made from.")
        return x

    def _experts(self, m: Mapped, spec: TensorSpec) -> Iterator[Tensor]:
        """Expert by expert: first all codes, then all scales, as they are stored."""
        stack = self.file.tensor(m.name)
        if self.config.text_config.quantize_experts:
            yield from (codes_of(blocks) for blocks in stack)
            yield from (scales_of(blocks) for blocks in stack)
        else:
            yield from (self._finite(m.name, expert).to(getattr(torch, spec.dtype)) for expert in stack)


def _dtype_of(slots: dict[str, TensorSlot]) -> Literal["float32", "bfloat16"]:
    """bfloat16 if the embedding is."""
    slot = slots.get("token_embd.weight")
    return "bfloat16" if slot is not None and slot.kind is TensorKind.BF16 else "float32"


def _quantized(path: Path, slots: dict[str, TensorSlot]) -> bool:
    """Whether the routed experts are MXFP4. ManifestError if only some are, or another tensor is."""
    packed = {name for name, slot in slots.items() if slot.kind is TensorKind.MXFP4}
    experts = {name for name in slots if name.endswith("_exps.weight")}
    if packed and packed != experts:
        name = min(packed ^ experts)
        raise ManifestError(f"{path}: {name} is {slots[name].kind.name}, but all routed experts and nothing else can "
                            "be MXFP4", remedy="Convert the model again from its original weights.")
    return bool(packed)


def _check_tensors(path: Path, c: TextConfig, slots: dict[str, TensorSlot]) -> None:
    expected = mapped_tensors(c)
    missing = [name for name in expected if name not in slots]
    if missing:
        raise ManifestError(f"{path}: {missing[0]} is missing ({len(missing)} tensors in all)")
    unexpected = [name for name in slots if name not in expected]
    if unexpected:
        raise ManifestError(f"{path}: {unexpected[0]} is unexpected ({len(unexpected)} tensors in all)")
    for name, m in expected.items():
        found = slots[name].shape
        if _plain(found) != _plain(m.shape):
            raise ManifestError(f"{path}: {name} has the shape {list(found)}, expected {list(m.shape)}")


def _plain(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Without axes of size 1: writers differ in those."""
    return tuple(n for n in shape if n != 1)
