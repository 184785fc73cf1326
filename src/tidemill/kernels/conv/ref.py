"""The causal depthwise convolution of width 4 in front of KDA's q, k and v, SiLU included.

`short_conv` is the engine's form: one row per token, its four taps gathered by the caller. `short_conv_train`
convolves whole sequences as shifted multiply-adds and is differentiable.
"""

from __future__ import annotations

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
