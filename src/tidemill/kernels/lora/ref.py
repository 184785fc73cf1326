"""The low-rank correction of one linear map, row-invariant.

The base weight is never merged with it: the frozen base may be 4 bit.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from tidemill.kernels.linear import MIN_COLUMNS, linear


def pad_rank(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """a[..., r, K] and b[..., N, r] with the rank zero-padded to a multiple of 16 (the same tensors if it is one)."""
    missing = -a.shape[-2] % MIN_COLUMNS
    if not missing:
        return a, b
    return F.pad(a, (0, 0, 0, missing)), F.pad(b, (0, missing))


def delta(x: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale · (x aᵀ) bᵀ: x[R, K], a[r, K], b[N, r] -> [R, N] in x's dtype. Row-invariant.

    Pad a and b once with `pad_rank`; otherwise it happens here on every call.
    """
    a, b = pad_rank(a, b)
    return linear(linear(x, a), b).mul_(scale)
