"""An adapter as the engine computes with it: factors per layer, ranks padded to the tile the row-invariant kernels
want."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.kernels import lora as lora_kernel
from tidemill.kernels.moe import ExpertLora
from tidemill.model.config import TextConfig
from tidemill.model.lora import LoraConfig, check_adapter, sites


@dataclass(frozen=True, slots=True)
class Factors:
    """One adapted map: a[r', in], b[out, r'] with r' the rank zero-padded to a multiple of 16."""

    a: Tensor
    b: Tensor
    scale: float

    def delta(self, x: Tensor) -> Tensor:
        """scale · (x aᵀ) bᵀ for rows x[R, in]; row-invariant."""
        return lora_kernel.delta(x, self.a, self.b, self.scale)


@dataclass(frozen=True, slots=True)
class LayerAdapter:
    """Factors of one layer by module name below the layer (`self_attn.o_proj`, `mlp.gate_proj`, …), and the
    experts'."""

    modules: Mapping[str, Factors]
    experts: ExpertLora | None

    def get(self, module: str) -> Factors | None:
        return self.modules.get(module)


def adapter_layers(text: TextConfig, lora: LoraConfig, tensors: Mapping[str, Tensor]) -> tuple[LayerAdapter, ...]:
    """Views of exported tensors for every layer, in the model's dtype (padding and casts copy, the rest does not).

    Raises as tidemill.model.lora.check_adapter does if the tensors do not fit.
    """
    check_adapter(text, lora, tensors)
    modules: list[dict[str, Factors]] = [{} for _ in range(text.num_hidden_layers)]
    stacks: list[dict[str, Tensor]] = [{} for _ in range(text.num_hidden_layers)]
    for site in sites(text, lora):
        _, _, index, local = site.module.split(".", 3)
        layer = int(index)
        a, b = (tensors[name].to(text.torch_dtype) for name in (site.a_name, site.b_name))
        if site.group == "experts":
            stacks[layer][f"{local[-2:]}.a"], stacks[layer][f"{local[-2:]}.b"] = a, b
        else:
            a, b = lora_kernel.pad_rank(a, b)
            modules[layer][local] = Factors(a.contiguous(), b.contiguous(), lora.scale)
    return tuple(LayerAdapter(m, _experts(s, lora.scale)) for m, s in zip(modules, stacks, strict=True))


def _experts(parts: dict[str, Tensor], scale: float) -> ExpertLora | None:
    if not parts:
        return None
    a13, b2 = parts["w1.a"].squeeze(0), parts["w2.b"].squeeze(0)
    return ExpertLora(a13, parts["w1.b"], parts["w3.b"], parts["w2.a"], b2, scale).padded()


def is_zero(layers: tuple[LayerAdapter, ...]) -> bool:
    """Whether every B is zero, so that the adapter changes nothing."""
    tensors = [f.b for layer in layers for f in layer.modules.values()]
    for layer in layers:
        if layer.experts is not None:
            tensors += [layer.experts.b1, layer.experts.b3, layer.experts.b2]
    return not any(bool(torch.count_nonzero(x)) for x in tensors)
