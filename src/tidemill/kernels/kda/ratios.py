"""Products of rows of one chunk with their decay between them, and the gradient of those products.

    A[i,j] = Σ_d k_i[d] k_j[d] exp(G_i[d] − G_j[d])      N[i,j] = Σ_d q_i[d] k_j[d] exp(G_i[d] − G_j[d])      j <= i

G is the inclusive cumulative log decay of the chunk. Only entries on and below the diagonal mean anything; above it
stands whatever the products left there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Ratios(Protocol):
    """q, k, g[m, C, K] of m chunks; G is the cumulative sum of g."""

    to_end: Tensor
    """exp(G_C − G_i), [m, C, K]."""

    def products(self) -> Tensor:
        """[m, 2C, C]: A above N."""
        ...

    def backward(self, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From d[m, 2C, C], the gradient of `products` (zero above the diagonals): for k as the row of A, for q, and
        for k as the column, each [m, C, K]. A row's share of dG is its factor times its gradient, a column's is minus
        that."""
        ...


class Factored:
    """Bounded decay: exp(G_i − G_j) split into two factors that both fit fp32, so that a matrix product forms the sum.

    The anchor is the chunk's first row alone (causality; its own gradient cancels exactly). A power of two centres the
    factors in fp32's range, exactly: adding the constant inside exp instead would round every exponent at its size.
    """

    def __init__(self, q: Tensor, k: Tensor, G: Tensor, lower_bound: float) -> None:
        self.to_end = (G[:, -1:] - G).exp_()
        offset = G - G[:, :1]
        centre = 2.0 ** round(-0.5 * (G.shape[1] - 1) * lower_bound / math.log(2.0))
        self._up = offset.exp().mul_(centre)
        self._down = offset.neg_().exp_().mul_(1.0 / centre)
        self._rows = torch.cat([k * self._up, q * self._up], dim=1)
        self._columns = k * self._down

    def products(self) -> Tensor:
        return torch.bmm(self._rows, self._columns.transpose(1, 2))

    def backward(self, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dk, dq = torch.bmm(d, self._columns).chunk(2, dim=1)
        dcolumns = torch.bmm(d.transpose(1, 2), self._rows)
        return dk.mul_(self._up), dq.mul_(self._up), dcolumns.mul_(self._down)


class Pairwise:
    """Unbounded decay: ratios pair by pair, one row of the chunk at a time, so that no more than C · K numbers a chunk
    exist at once. Every ratio is at most 1, whatever the decay.

    The log decay between two rows is summed between them: the difference of two cumulative sums would lose the digits
    of a weak decay behind a strong one.
    """

    def __init__(self, q: Tensor, k: Tensor, g: Tensor) -> None:
        self._both, self._k, self._g = torch.stack([k, q], dim=2), k, g
        self.to_end = F.pad(g[:, 1:], (0, 0, 0, 1)).flip(1).cumsum(1).flip(1).exp_()

    def _ratios(self) -> Iterator[Tensor]:
        """exp(G_i − G_j) for j <= i, [m, i + 1, K], row after row."""
        between = torch.zeros_like(self._g)
        for i in range(self._g.shape[1]):
            between[:, :i] += self._g[:, i : i + 1]
            yield between[:, : i + 1].exp()

    def products(self) -> Tensor:
        m, size, _ = self._k.shape
        out = self._k.new_zeros((m, 2, size, size))
        for i, ratio in enumerate(self._ratios()):
            out[:, :, i, : i + 1] = torch.bmm(self._both[:, i], ratio.mul_(self._k[:, : i + 1]).transpose(1, 2))
        return out.view(m, 2 * size, size)

    def backward(self, d: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        m, size, _ = self._k.shape
        d = d.view(m, 2, size, size)
        drows, dcolumns = torch.empty_like(self._both), torch.zeros_like(self._k)
        for i, ratio in enumerate(self._ratios()):
            di = d[:, :, i, : i + 1]
            drows[:, i] = torch.bmm(di, ratio * self._k[:, : i + 1])
            dcolumns[:, : i + 1].add_(torch.bmm(di.transpose(1, 2), self._both[:, i]).mul_(ratio))
        return drows[:, :, 0], drows[:, :, 1], dcolumns
