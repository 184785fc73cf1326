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
    wt = w.reshape(-1, WIDTH).t().contiguous()
    p = taps[:, 0].float() * wt[0]
    for j in range(1, WIDTH):
        p.add_(taps[:, j].float() * wt[j])
    return silu(p).to(taps.dtype)


def short_conv_rows(known: Tensor, rows: Tensor, w: Tensor) -> Tensor:
    """`short_conv` of the taps known[rows], to the same bits, without putting the taps side by side in memory.

    known[M, C], rows[R, 4] int64 (oldest tap first), w[C, 4] fp32 -> [R, C] in known's dtype. Mutates nothing.
    """
    wt = w.reshape(-1, WIDTH).t().contiguous()
    columns = rows.t().contiguous()
    p = known.index_select(0, columns[0]).float().mul_(wt[0])
    for j in range(1, WIDTH):
        p.add_(known.index_select(0, columns[j]).float().mul_(wt[j]))
    return silu(p).to(known.dtype)
