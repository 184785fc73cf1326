"""Model folder to GGUF, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels import mxfp4
from tidemill.model.base import BaseStore
from tidemill.model.gguf import vocabulary
from tidemill.model.gguf.container import Progress, TensorKind, TensorSlot, write_gguf
from tidemill.model.gguf.metadata import check_exportable, file_type, to_metadata
from tidemill.model.gguf.tensors import Mapped, Rule, mapped_tensors, to_blocks, to_gguf

DenseKind = Literal["f32", "bf16"]
ExpertKind = Literal["mxfp4", "f32", "bf16"]
_KINDS = {"f32": TensorKind.F32, "bf16": TensorKind.BF16, "mxfp4": TensorKind.MXFP4}
_DTYPES = {TensorKind.F32: torch.float32, TensorKind.BF16: torch.bfloat16}


def export_gguf(folder: Path, path: Path, *, dense: DenseKind | None = None, experts: ExpertKind | None = None,
                tokenizer: bool = True, progress: Progress | None = None) -> int:
    """Write the model of `folder` as a GGUF file at `path`, whole or not at all; returns its size in bytes.

    `dense` is the kind of matrices (None: as the model computes; norms, gates, convolutions and routers are F32
    always), `experts` that of routed experts (None: as stored; packed ones are repacked without loss, `mxfp4` of
    unpacked ones quantises). `tokenizer` puts folder's tokenizer and our chat template into the file. At most one
    expert or one other tensor is held at a time. An existing `path` is replaced.

    Raises ConfigError naming the field if the architecture has no place in the format or the tokenizer none,
    InputError for an unknown kind or a missing tokenizer, ManifestError or IntegrityError as BaseStore.open does.
    """
    store = BaseStore.open(folder)
    c = store.config.text_config
    check_exportable(c)
    if tokenizer and not (folder / vocabulary.FILE).is_file():
        raise InputError(f"{folder} holds no {vocabulary.FILE}", field="tokenizer",
                         remedy="Export without the tokenizer; prompts are then lists of ids.")
    words = vocabulary.to_metadata(folder) if tokenizer else vocabulary.no_tokenizer(c)
    computed = "bf16" if c.dtype == "bfloat16" else "f32"
    dense_kind = _kind("dense", dense or computed, (TensorKind.F32, TensorKind.BF16))
    stored = "mxfp4" if c.quantize_experts else dense_kind.name.lower()
    expert_kind = _kind("experts", experts or stored, tuple(_KINDS.values()))
    mapped = mapped_tensors(c)
    slots = [TensorSlot(m.name, m.shape, _slot_kind(m, dense_kind, expert_kind)) for m in mapped.values()]

    def content(slot: TensorSlot) -> Iterator[Tensor]:
        m = mapped[slot.name]
        if m.rule is Rule.EXPERTS:
            yield from _experts(store, m.sources[0], slot.kind)
        else:
            yield _cast(to_gguf(c, m, store.tensor), slot.kind)

    metadata = to_metadata(store.config, folder.resolve().name, file_type(dense_kind, expert_kind)) | words
    return write_gguf(path, metadata, slots, content, progress)


def _kind(field: str, name: str, allowed: tuple[TensorKind, ...]) -> TensorKind:
    kind = _KINDS.get(name)
    if kind is None or kind not in allowed:
        raise InputError(f"{field} = {name!r}: expected {' or '.join(k.name.lower() for k in allowed)}", field=field)
    return kind


def _slot_kind(m: Mapped, dense: TensorKind, experts: TensorKind) -> TensorKind:
    if m.rule is Rule.EXPERTS:
        return experts
    return TensorKind.F32 if m.exact else dense


def _experts(store: BaseStore, name: str, kind: TensorKind) -> Iterator[Tensor]:
    """A stack of experts in one kind, expert by expert."""
    if not store.config.text_config.quantize_experts:
        for w in store.tensor(name):
            yield to_blocks(*mxfp4.encode(w)) if kind is TensorKind.MXFP4 else _cast(w, kind)
        return
    for packed, scale in zip(*store.packed(name), strict=True):
        yield to_blocks(packed, scale) if kind is TensorKind.MXFP4 else _cast(mxfp4.decode(packed, scale), kind)


def _cast(x: Tensor, kind: TensorKind) -> Tensor:
    return x.to(_DTYPES[kind])
