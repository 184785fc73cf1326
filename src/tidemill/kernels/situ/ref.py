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
    """Keeps the sigmoid and the two tangents (backward needs nothing else; a tangent costs more than its memory)."""

    @staticmethod
    def forward(ctx: Any, g: Tensor, u: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        gf, uf = wide(g), wide(u)
        s, t = torch.sigmoid(gf), torch.div(gf, beta).tanh_()
        up = uf if linear_beta is None else torch.div(uf, linear_beta).tanh_()
        ctx.save_for_backward(s, t, up)
        ctx.beta, ctx.linear_beta, ctx.dtypes = beta, linear_beta, (g.dtype, u.dtype)
        return (s * t).mul_(up).mul_(beta if linear_beta is None else beta * linear_beta).to(g.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        s, t, up = ctx.saved_tensors
        beta, linear_beta = ctx.beta, ctx.linear_beta
        dy = wide(grad_outputs[0])
        gate = s * t
        # d gate / dg = (1 − t²) s + β t s (1 − s), written as s − t·gate + β·gate·(1 − s).
        slope = torch.addcmul(s, t, gate, value=-1.0).addcmul_(gate, 1.0 - s, value=beta).mul_(dy).mul_(up)
        du = gate.mul_(dy).mul_(beta)
        if linear_beta is not None:
            slope.mul_(linear_beta)
            du.addcmul_(du * up, up, value=-1.0)
        return slope.to(ctx.dtypes[0]), du.to(ctx.dtypes[1]), None, None


def situ_glu_train(g: Tensor, u: Tensor, beta: float, linear_beta: float | None) -> Tensor:
    """The same function, differentiable in g and u (first order). fp32 inside (fp64 for fp64 inputs)."""
    return _SituGlu.apply(g, u, beta, linear_beta)
