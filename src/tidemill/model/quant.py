"""Training with low-precision experts: forward on decode(encode(.)), gradients straight through.

Weights are rounded through MXFP4, activations through MXFP8 (K3 technical report, 4.1: this scheme from SFT on).
Scales are made anew from the current values in every forward; nothing is learned. LoRA training computes on the stored
weights, which the rounding leaves as they are.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tidemill.kernels import mxfp4

Quantization = Literal["none", "weights", "weights+activations"]
"""What the routed experts compute on. none: the values themselves; weights: w1, w2, w3 through MXFP4, so that the model
trained is the one stored; weights+activations: also the inputs of the three products through MXFP8, the latent rows and
the activation's output (K3's scheme)."""


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
