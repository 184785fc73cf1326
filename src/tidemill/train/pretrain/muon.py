"""Muon, per head: momentum, made orthogonal, is the update of every hidden matrix.

    M ← μ M + G        U = G + μ M        W ← (1 − lr·wd) W − lr · 0.2 √max(rows, cols) · orth(U)

orth(U) is the orthogonal factor of U, approximated by Newton-Schulz steps. A weight is cut into the matrices that act
as one map each: the slice of every head in query, key and value maps, every expert of a stack, else the whole weight.
The factor gives an update the size AdamW's would have, so that both share a learning rate and a weight decay. Sources:
K3 technical report (per-head Muon); Muon (K. Jordan) for the polynomial; Moonlight report for the factor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor
from torch.nn import Parameter

_POLYNOMIAL = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
UPDATE_SIZE = 0.2
"""Root mean square of an update's entries per unit of learning rate, about that of AdamW."""
_TINY = 1e-7


@dataclass(frozen=True, slots=True)
class Cut:
    """How a weight [n · rows, cols] or [n, rows, cols] falls into matrices: n blocks of sum(parts) rows, each cut into
    `parts` again (key rows and value rows of a head, say)."""

    blocks: int
    parts: tuple[int, ...]

    def matrices(self, x: Tensor) -> list[Tensor]:
        """Views [blocks, part, cols] of x, one for each part."""
        return list(x.view(self.blocks, sum(self.parts), x.shape[-1]).split(self.parts, dim=1))

    def joined(self, matrices: Iterable[Tensor], like: Tensor) -> Tensor:
        """Inverse of `matrices`, in the shape of `like`."""
        return torch.cat(list(matrices), dim=1).view_as(like)


def orthogonalised(x: Tensor, steps: int = NEWTON_SCHULZ_STEPS) -> Tensor:
    """x[..., m, n] with its singular vectors kept and its singular values moved to between 0.65 and 1.25 (those above
    about 1/500 of the Frobenius norm; smaller ones move towards it). fp32; a zero matrix stays zero."""
    a, b, c = _POLYNOMIAL
    wide = x.shape[-2] <= x.shape[-1]
    y = (x if wide else x.mT).float()
    y = y / (y.flatten(-2).norm(dim=-1)[..., None, None] + _TINY)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * gram @ gram) @ y
    return y if wide else y.mT


class Muon(torch.optim.Optimizer):
    """Parameters with their cuts. State: one momentum tensor per parameter."""

    def __init__(self, weights: Iterable[tuple[Parameter, Cut]], *, lr: float, momentum: float,
                 weight_decay: float) -> None:
        pairs = list(weights)
        self._cuts = [cut for _, cut in pairs]
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([p for p, _ in pairs], defaults)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update every parameter that has a gradient, in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        (group,) = self.param_groups
        for p, cut in zip(group["params"], self._cuts, strict=True):
            if p.grad is not None:
                self._update(p, cut, group)
        return loss

    def _update(self, p: Tensor, cut: Cut, group: dict[str, Any]) -> None:
        grad = p.grad
        assert grad is not None
        state = self.state[p]
        if not state:
            state["momentum"] = torch.zeros_like(p)
        momentum: Tensor = state["momentum"].mul_(group["momentum"]).add_(grad)
        ahead = torch.add(grad, momentum, alpha=group["momentum"])
        update = cut.joined((_sized(orthogonalised(m)) for m in cut.matrices(ahead)), like=p)
        p.mul_(1.0 - group["lr"] * group["weight_decay"]).add_(update.to(p.dtype), alpha=-group["lr"])


def _sized(matrix: Tensor) -> Tensor:
    return matrix * (UPDATE_SIZE * math.sqrt(max(matrix.shape[-2:])))
