"""From (row, choice) pairs to a padded buffer per expert and back.

Every expert gets `capacity` rows, the largest count rounded up to a multiple of 16; unused rows are zero. Which row
of the buffer a pair lands in has no influence on its bits, so no order has to be kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.kernels.linear import padded_rows


@dataclass(frozen=True, slots=True)
class Dispatch:
    """slots[R·k] is the buffer row (expert · capacity + place) of each pair; `capacity` rows per expert."""

    slots: Tensor
    capacity: int
    num_experts: int
    top_k: int

    def scatter(self, x: Tensor) -> Tensor:
        """x[R, l] copied to its k places: [E, capacity, l], zero elsewhere."""
        buffer = x.new_zeros((self.num_experts * self.capacity, x.shape[1]))
        buffer[self.slots] = x.repeat_interleave(self.top_k, dim=0)
        return buffer.view(self.num_experts, self.capacity, -1)

    def gather(self, y: Tensor) -> Tensor:
        """Buffer y[E, capacity, l] back to pairs: [R, k, l]."""
        return y.flatten(0, 1).index_select(0, self.slots).view(-1, self.top_k, y.shape[-1])


def plan_dispatch(ids: Tensor, num_experts: int) -> Dispatch:
    """Places for ids[R, k] int64."""
    flat = ids.reshape(-1)
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=num_experts)
    starts = counts.cumsum(0) - counts
    capacity = padded_rows(max(int(counts.max()), 1))
    slots = torch.empty_like(flat)
    sorted_ids = flat[order]
    slots[order] = torch.arange(flat.numel()) - starts[sorted_ids] + sorted_ids * capacity
    return Dispatch(slots=slots, capacity=capacity, num_experts=num_experts, top_k=ids.shape[1])
