"""Training with MXFP4 experts: forward on decode(encode(w)), gradients straight through.

For pretraining, warm-up and full fine-tuning. LoRA training computes on the stored bytes and needs none of this.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.kernels import mxfp4


class _FakeQuant(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor) -> Tensor:
        return mxfp4.decode(*mxfp4.encode(w), dtype=w.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        return grad_outputs[0]


def fake_quant(w: Tensor) -> Tensor:
    """decode(encode(w)) of w[..., K]; its gradient is passed on unchanged (straight-through)."""
    return _FakeQuant.apply(w)
