"""The one map between stacked expert tensors in memory and the tensors of checkpoint files.

In memory: `…block_sparse_moe.experts.w1` [E, out, in]. In files one of four forms:

- per expert and packed (MXFP4, as K3 is released): `…experts.{e}.w1.weight_packed` u8 [out, in/2] and
  `…experts.{e}.w1.weight_scale` u8 [out, in/32];
- per expert and plain (as Kimi Linear is released): `…experts.{e}.w1.weight` [out, in];
- stacked and packed: `…experts.w1_packed` u8 [E, out, in/2] and `…experts.w1_scale` u8 [E, out, in/32];
- stacked and plain: `…experts.w1` [E, out, in].

All other names are the same. K3's files put `language_model.` before the names of the text model, as a vision tower
and a projector lie beside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tidemill.kernels.mxfp4 import BLOCK
from tidemill.model.config import TextConfig
from tidemill.model.inventory import TensorSpec, inventory
from tidemill.model.tensor_bytes import TensorPlan

Layout = Literal["per-expert", "stacked"]
Part = Literal["packed", "scale", "weight"]

TEXT_PREFIX = "language_model."
_VISION = ("vision_tower.", "mm_projector.")
_STACKED = re.compile(r"^(.*\.experts)\.(w[123])$")
_IN_FILES = re.compile(
    r"^(.*\.experts)\.(?:\d+\.(w[123])\.(weight_packed|weight_scale|weight)|(w[123])(_packed|_scale)?)$")


class ExpertForm(NamedTuple):
    """How the routed experts lie in files."""

    layout: Layout
    quantized: bool


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a checkpoint file and where it belongs: slice `expert` of stack `stacked` (None: the whole
    tensor), `part` packed, scale or weight."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stacked: str
    expert: int | None
    part: Part

    @property
    def plan(self) -> TensorPlan:
        return TensorPlan(self.name, self.dtype, self.shape)


def file_tensors(config: TextConfig, layout: Layout = "per-expert") -> dict[str, FileTensor]:
    """Every tensor a checkpoint of this model holds, by file name, in model order."""
    form = ExpertForm(layout, config.quantize_experts)
    return {t.name: t for spec in inventory(config).values() for t in split_stacked(spec, form)}


def split_stacked(spec: TensorSpec, form: ExpertForm) -> Iterator[FileTensor]:
    """The file tensors one in-memory tensor is stored as."""
    match = _STACKED.match(spec.name)
    if match is None:
        yield FileTensor(spec.name, spec.shape, spec.dtype, spec.name, None, "weight")
        return
    experts, rows, columns = spec.shape
    if form.layout == "stacked":
        if form.quantized:
            packed, scale = (experts, rows, columns // 2), (experts, rows, columns // BLOCK)
            yield FileTensor(spec.name + "_packed", packed, "uint8", spec.name, None, "packed")
            yield FileTensor(spec.name + "_scale", scale, "uint8", spec.name, None, "scale")
        else:
            yield FileTensor(spec.name, spec.shape, spec.dtype, spec.name, None, "weight")
        return
    for e in range(experts):
        prefix = f"{match[1]}.{e}.{match[2]}."
        if form.quantized:
            yield FileTensor(prefix + "weight_packed", (rows, columns // 2), "uint8", spec.name, e, "packed")
            yield FileTensor(prefix + "weight_scale", (rows, columns // BLOCK), "uint8", spec.name, e, "scale")
        else:
            yield FileTensor(prefix + "weight", (rows, columns), spec.dtype, spec.name, e, "weight")


def in_storage_order(spec: TensorSpec, form: ExpertForm) -> list[FileTensor]:
    """`split_stacked` in the order files are written in: the packed parts of a stack side by side and its scales side
    by side, so that each maps back as one view."""
    return sorted(split_stacked(spec, form), key=lambda t: t.part)


def storage_order(config: TextConfig, layout: Layout = "per-expert") -> list[FileTensor]:
    """All file tensors of a model in the order they are written in."""
    form = ExpertForm(layout, config.quantize_experts)
    return [t for spec in inventory(config).values() for t in in_storage_order(spec, form)]


def expert_form(name: str) -> tuple[str, ExpertForm] | None:
    """The stack a file tensor belongs to and the form it shows, from its name (without `language_model.`); None if it
    is no expert's."""
    match = _IN_FILES.match(name)
    if match is None:
        return None
    if match[2] is not None:
        return f"{match[1]}.{match[2]}", ExpertForm("per-expert", match[3] != "weight")
    return f"{match[1]}.{match[4]}", ExpertForm("stacked", match[5] is not None)


def is_vision(name: str) -> bool:
    """Whether a file tensor belongs to the vision tower or its projector."""
    return name.startswith(_VISION)


def expert_name(stacked: str, expert: int, suffix: str) -> str:
    """`…experts.w1`, 3, `lora_A.weight` -> `…experts.3.w1.lora_A.weight`. ValueError if `stacked` is no stack of
    experts."""
    match = _STACKED.match(stacked)
    if match is None:
        raise ValueError(f"{stacked} is not a stack of experts")
    return f"{match[1]}.{expert}.{match[2]}.{suffix}"
