"""SiTU-GLU, the gated activation of every feed-forward block (K3 technical report).

`situ_glu` is the engine's form (row-invariant, no gradient); `situ_glu_train` is differentiable and keeps only its
two inputs for the backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.kernels.pointwise import sigmoid, wide


def situ_glu(g: Tensor, u: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """[β₁ tanh(g/β₁) · sigmoid(g)] · [β₂ tanh(u/β₂)], elementwise, in fp32, one cast to g's dtype.

    g and u of one shape are the raw gate and up projections; `linear_beta` None leaves the up branch uncapped.
    |result| < β₁·β₂. Mutates nothing.
    """
    gf, uf = g.float(), u.float()
    y = sigmoid(gf).mul_(torch.div(gf, beta).tanh_().mul_(beta))
    return y.mul_(uf if linear_beta is None else torch.div(uf, linear_beta).tanh_().mul_(linear_beta)).to(g.dtype)


class _SituGlu(torch.autograd.Function):
    """Saves g and u only; both branches are recomputed in backward."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        ctx.save_for_backward(g, u)
        ctx.betas = (beta, linear_beta)
        gf, uf = wide(g), wide(u)
        gate = torch.sigmoid(gf).mul_(torch.div(gf, beta).tanh_().mul_(beta))
        up = uf if linear_beta is None else torch.div(uf, linear_beta).tanh_().mul_(linear_beta)
        return gate.mul_(up).to(g.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        g, u = ctx.saved_tensors
        beta, linear_beta = ctx.betas
        dy, gf, uf = wide(grad_outputs[0]), wide(g), wide(u)
        s, t = torch.sigmoid(gf), torch.div(gf, beta).tanh_()
        gate = (s * t).mul_(beta)
        slope = torch.addcmul(s, s, torch.square(t), value=-1.0).addcmul_(gate, 1.0 - s)
        if linear_beta is None:
            return slope.mul_(dy).mul_(uf).to(g.dtype), gate.mul_(dy).to(u.dtype), None, None
        tu = torch.div(uf, linear_beta).tanh_()
        du = gate.mul_(dy).mul_(torch.square(tu).neg_().add_(1.0))
        return slope.mul_(dy).mul_(tu).mul_(linear_beta).to(g.dtype), du.to(u.dtype), None, None


def situ_glu_train(g: Tensor, u: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """The same function, differentiable in g and u (first order). fp32 inside (fp64 for fp64 inputs)."""
    return _SituGlu.apply(g, u, beta, linear_beta)
