"""The one map between stacked expert tensors in memory and per-expert tensors in files.

In memory: `…block_sparse_moe.experts.w1` [E, out, in]. In files: `…experts.{e}.w1.weight_packed` u8 [out, in/2] and
`.weight_scale` u8 [out, in/32], or `…experts.{e}.w1.weight` if the experts are not quantised. All other names are
the same.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from tidemill.kernels.mxfp4 import BLOCK
from tidemill.model.config import TextConfig
from tidemill.model.inventory import TensorSpec, inventory

_STACKED = re.compile(r"^(.*\.experts)\.(w[123])$")


@dataclass(frozen=True, slots=True)
class FileTensor:
    """One tensor of a checkpoint file and where it belongs: slice `expert` of stack `stacked` (None: the whole
    tensor), `part` packed, scale or weight."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    stacked: str
    expert: int | None
    part: str


def file_tensors(config: TextConfig) -> dict[str, FileTensor]:
    """Every tensor a checkpoint of this model holds, by file name, in model order."""
    quantized = config.quantize_experts
    return {t.name: t for spec in inventory(config).values() for t in split_stacked(spec, quantized=quantized)}


def split_stacked(spec: TensorSpec, *, quantized: bool) -> Iterator[FileTensor]:
    """The file tensors one in-memory tensor is stored as."""
    match = _STACKED.match(spec.name)
    if match is None:
        yield FileTensor(spec.name, spec.shape, spec.dtype, spec.name, None, "weight")
        return
    experts, rows, columns = spec.shape
    for e in range(experts):
        prefix = f"{match[1]}.{e}.{match[2]}."
        if quantized:
            yield FileTensor(prefix + "weight_packed", (rows, columns // 2), "uint8", spec.name, e, "packed")
            yield FileTensor(prefix + "weight_scale", (rows, columns // BLOCK), "uint8", spec.name, e, "scale")
        else:
            yield FileTensor(prefix + "weight", (rows, columns), spec.dtype, spec.name, e, "weight")


def expert_name(stacked: str, expert: int, suffix: str) -> str:
    """`…experts.w1`, 3, `lora_A.weight` -> `…experts.3.w1.lora_A.weight`. ValueError if `stacked` is no stack of
    experts."""
    match = _STACKED.match(stacked)
    if match is None:
        raise ValueError(f"{stacked} is not a stack of experts")
    return f"{match[1]}.{expert}.{match[2]}.{suffix}"
