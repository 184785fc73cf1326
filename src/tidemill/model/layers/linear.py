"""Bias-free linear maps and gains as modules, with room for a low-rank adapter beside the frozen weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tidemill.kernels.norm import rms_norm_train


class Linear(nn.Linear):
    """y = x Wᵀ, plus scale · (x Aᵀ) Bᵀ once an adapter is attached. weight[out, in], at first undefined.

    A torch.nn.Linear, so that programs which look for one (PEFT) find it."""

    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None

    def __init__(self, inputs: int, outputs: int, dtype: torch.dtype) -> None:
        super().__init__(inputs, outputs, bias=False, dtype=dtype)
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        self.lora_scale = 0.0

    def attach_lora(self, a: nn.Parameter, b: nn.Parameter, scale: float) -> None:
        """a[r, in] (may be shared with another map), b[out, r]; replaces an earlier adapter."""
        self.lora_a, self.lora_b, self.lora_scale = a, b, scale

    def reset_parameters(self) -> None:
        """Nothing: tidemill.model.initialisation draws all weights."""

    def forward(self, input: Tensor) -> Tensor:
        x = input
        y = F.linear(x, self.weight)
        if self.lora_a is None or self.lora_b is None:
            return y
        low = F.linear(x, self.lora_a.to(x.dtype))
        return torch.add(y, F.linear(low, self.lora_b.to(x.dtype)), alpha=self.lora_scale)


class Weight(nn.Module):
    """A bare `weight` of some shape: convolutions, pseudo-queries, gains."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))


class RMSNorm(Weight):
    """Root-mean-square norm with a gain, cast before the gain."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype) -> None:
        super().__init__(width, dtype=dtype)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm_train(x, self.weight, self.eps)
