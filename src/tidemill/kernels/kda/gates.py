"""The decay gate for training, with its gradient written out so that only z and g are kept."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.kernels.pointwise import wide


class _BoundedGate(torch.autograd.Function):
    """z[..., H, D], rate[H], bias[H, D] -> bound · sigmoid(rate (z + bias))."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, rate: Tensor, bias: Tensor, bound: float) -> Tensor:
        g = torch.sigmoid((z + bias).mul_(rate.unsqueeze(-1))).mul_(bound)
        ctx.save_for_backward(z, rate, bias, g)
        ctx.bound = bound
        return g

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        z, rate, bias, g = ctx.saved_tensors
        # d sigmoid = s (1 − s) with s = g / bound.
        inner = torch.addcmul(g, g, g, value=-1.0 / ctx.bound).mul_(grad_outputs[0])
        drate = None
        if ctx.needs_input_grad[1]:
            drate = (inner * (z + bias)).flatten(0, -3).sum((0, 2))
        dz = inner.mul_(rate.unsqueeze(-1))
        return dz, drate, dz.flatten(0, -3).sum(0) if ctx.needs_input_grad[2] else None, None


class _UnboundedGate(torch.autograd.Function):
    """z[..., H, D], rate[H], bias[H, D] -> −rate · softplus(z + bias)."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, rate: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(z, rate, bias)
        return F.softplus(z + bias).mul_(rate.neg().unsqueeze(-1))

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        z, rate, bias = ctx.saved_tensors
        raw, dg = z + bias, grad_outputs[0]
        drate = None
        if ctx.needs_input_grad[1]:
            drate = (F.softplus(raw) * dg).flatten(0, -3).sum((0, 2)).neg_()
        dz = torch.sigmoid(raw).mul_(dg).mul_(rate.neg().unsqueeze(-1))
        return dz, drate, dz.flatten(0, -3).sum(0) if ctx.needs_input_grad[2] else None


def gate_train(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """`gate` for training: z[..., H, D] -> g[..., H, D] in fp32 (fp64 for fp64), differentiable in z, A_log and
    dt_bias."""
    heads, dim = z.shape[-2:]
    zf = wide(z)
    rate = A_log.flatten()[:heads].to(zf.dtype).exp()
    bias = dt_bias.view(heads, dim).to(zf.dtype)
    if lower_bound is None:
        return _UnboundedGate.apply(zf, rate, bias)
    return _BoundedGate.apply(zf, rate, bias, lower_bound)
