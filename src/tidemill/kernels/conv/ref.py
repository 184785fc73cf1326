"""The causal depthwise convolution of width 4 in front of KDA's q, k and v, SiLU included.

`short_conv` is the engine's form: one row per token, its four taps gathered by the caller. `short_conv_train`
convolves whole sequences as shifted multiply-adds and is differentiable.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.kernels.pointwise import silu

WIDTH = 4


def short_conv(taps: Tensor, w: Tensor) -> Tensor:
    """silu(Σ_j w[:, j] · taps[:, j]), j = 0 the oldest token and j = 3 the current one.

    taps[R, 4, C] contiguous; w[C, 4] (also [C, 1, 4]) fp32. Products and sum in fp32 in the order of j, SiLU in
    fp32, one cast to taps' dtype -> [R, C]. Row-invariant. Mutates nothing.
    """
    p = taps.float() * w.reshape(-1, WIDTH).t()
    return silu((p[:, 0] + p[:, 1]).add_(p[:, 2]).add_(p[:, 3])).to(taps.dtype)


def short_conv_train(x: Tensor, w: Tensor, state: Tensor | None = None) -> Tensor:
    """The same over sequences: x[B, T, C] -> [B, T, C], differentiable in x, w and state.

    state[B, 3, C] holds the three inputs before x (None: zeros). fp32 inside, one cast to x's dtype.
    """
    batch, length, channels = x.shape
    w = w.reshape(-1, WIDTH)
    if state is None:
        padded = F.pad(x.float(), (0, 0, WIDTH - 1, 0))
    else:
        padded = torch.cat([state.reshape(batch, WIDTH - 1, channels).float(), x.float()], dim=1)
    y = padded[:, :length] * w[:, 0]
    for j in range(1, WIDTH):
        y = torch.addcmul(y, padded[:, j : j + length], w[:, j])
    return F.silu(y).to(x.dtype)
