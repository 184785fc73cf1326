"""Products of rows sorted by expert with one matrix per expert, for training.

Does: place every (row, choice) pair next to the others of its expert, multiply group by group without padding, bring
results back. Does not: row invariance (the engine's form is dispatch.py), gradients (train.py writes them out).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.kernels.pointwise import wide

_ALIGNMENT = 16
"""Bytes: the stride between rows of every operand of torch's grouped product is a multiple of this."""


@dataclass(frozen=True, slots=True)
class Groups:
    """The R·k pairs of ids[R, k] in the order of their experts (a stable sort, so by row within an expert).

    order[R·k]: the flat pair at each sorted place; places[R, k]: the inverse; ends[E] int32: one past the last place
    of each expert; counts[E] int64.
    """

    order: Tensor
    places: Tensor
    ends: Tensor
    counts: Tensor

    @property
    def top_k(self) -> int:
        return self.places.shape[1]

    def spread(self, x: Tensor) -> Tensor:
        """x[R, n] copied to the places of its k pairs: [R·k, n]."""
        return x.index_select(0, self.order // self.top_k)

    def gather_sum(self, y: Tensor) -> Tensor:
        """Σ_j y[place of (R, j)]: y[R·k, n] -> [R, n] in y's dtype, summed in fp32 in the order of the choices."""
        total = wide(y.index_select(0, self.places[:, 0]))
        for j in range(1, self.top_k):
            total += y.index_select(0, self.places[:, j])
        return total.to(y.dtype)

    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        """Σ_j weights[R, j] · y[place of (R, j)], [R, n] in y's dtype, summed in the dtype of weights[R, k]."""
        total = weights.new_zeros((weights.shape[0], y.shape[1]))
        for j in range(self.top_k):
            total.addcmul_(y.index_select(0, self.places[:, j]).to(total.dtype), weights[:, j : j + 1])
        return total.to(y.dtype)


def plan_groups(ids: Tensor, num_experts: int) -> Groups:
    """Places for ids[R, k] int64, each in 0..num_experts−1; R may be 0."""
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    places = torch.empty_like(order)
    places[order] = torch.arange(order.numel(), device=order.device)
    counts = torch.bincount(flat, minlength=num_experts)
    return Groups(order=order, places=places.view_as(ids), ends=counts.cumsum(0).to(torch.int32), counts=counts)


def grouped_product(x: Tensor, w: Tensor, groups: Groups) -> Tensor:
    """y[P, N]: x_e w_e for the rows of each expert e. x[P, K] in sorted order, w[E, K, N] (any strides), P = R·k.

    fp32 and bf16 go to torch's grouped product, fp32 accumulation; fp64, which that lacks, takes a product per
    expert (gradient checks and reference runs).
    """
    if x.dtype is torch.float64:
        sizes = groups.counts.tolist()
        return torch.cat([a @ b for a, b in zip(x.split(sizes), w, strict=True)])
    step = _ALIGNMENT // x.element_size()
    inner, columns = -w.shape[1] % step, -w.shape[2] % step
    if inner:
        x = F.pad(x, (0, inner))
    if inner or columns:
        w = F.pad(w, (0, columns, 0, inner))
    if w.dtype is torch.bfloat16 and w.stride(2) == 1:
        # bf16 on the CPU wants the weights contiguous along the contraction: 5 times faster, the copy included.
        w = w.transpose(1, 2).contiguous().transpose(1, 2)
    y = F.grouped_mm(x.contiguous(), w, offs=groups.ends)
    return y[:, :-columns] if columns else y


def grouped_outer(a: Tensor, b: Tensor, groups: Groups) -> Tensor:
    """Weight gradients dw[E, M, N]: a_eᵀ b_e over the rows of each expert. a[P, M] and b[P, N] in sorted order.

    Zero for an expert without rows. dtypes as in `grouped_product`.
    """
    if a.dtype is torch.float64:
        sizes = groups.counts.tolist()
        return torch.stack([x.t() @ y for x, y in zip(a.split(sizes), b.split(sizes), strict=True)])
    step = _ALIGNMENT // a.element_size()
    m, n = a.shape[1], b.shape[1]
    a, b = (F.pad(x, (0, -x.shape[1] % step)).contiguous() for x in (a, b))
    return F.grouped_mm(a.t(), b, offs=groups.ends)[:, :m, :n]
