"""Row-invariant matrix products in plain torch.

Does: y = x wᵀ such that the bits of a row depend on that row alone, whatever the number of rows. Does not: gradients
worth having (training calls torch.nn.functional.linear), quantised weights. The rules are observations about the BLAS
libraries torch ships with (docs/numerics.md); `tidemill doctor` repeats them on the machine at hand.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

ROW_TILE = 16
"""Rows of every product are zero-padded to a multiple of this."""
MIN_COLUMNS = 16
"""Fewer output columns than this take other BLAS kernels; weights are zero-padded up to it."""
_MIN_BF16_WEIGHTS = 256
"""bf16 products with at most this many weights take a kernel that depends on the number of rows."""


def padded_rows(rows: int) -> int:
    """The smallest multiple of ROW_TILE that is >= rows."""
    return -(-rows // ROW_TILE) * ROW_TILE


def pad_rows(x: Tensor) -> Tensor:
    """x[R, ...] with zero rows appended up to a multiple of ROW_TILE; x itself if there is nothing to do."""
    missing = -x.shape[0] % ROW_TILE
    if not missing:
        return x
    return torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])


def pad_columns(w: Tensor) -> Tensor:
    """w[N, K] with zero output rows appended so that its product takes the row-invariant kernels; w itself if it
    does."""
    n, k = w.shape
    wanted = MIN_COLUMNS if n < MIN_COLUMNS else n
    if w.dtype is torch.bfloat16 and wanted * k <= _MIN_BF16_WEIGHTS:
        wanted = padded_rows(_MIN_BF16_WEIGHTS // k + 1)
    return w if wanted == n else F.pad(w, (0, 0, 0, wanted - n))


def linear(x: Tensor, w: Tensor) -> Tensor:
    """y[R, N] = x[R, K] w[N, K]ᵀ, contiguous, in the dtype of x (fp32 or bf16; both operands alike).

    Rows are zero-padded to a multiple of 16 and narrow weights to 16 columns inside, so a row has the same bits
    alone and among others. Callers that keep their batch padded already pay nothing for it. Mutates nothing.

        >>> y = linear(torch.randn(5, 64), torch.randn(2, 64)); y.shape
        torch.Size([5, 2])
    """
    rows, columns = x.shape[0], w.shape[0]
    wide = pad_columns(w)
    if rows % ROW_TILE == 0 and wide is w:
        return F.linear(x.contiguous(), w)
    y = F.linear(pad_rows(x.contiguous()), wide)[:rows]
    return y if wide is w else y[:, :columns].contiguous()
