"""The normalisations with hand-written gradients: few passes over memory, and only the inputs are kept for backward.

The same formulas as ref.py; fp32 inside (fp64 for fp64 inputs, so that gradients can be checked).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.kernels.pointwise import wide


def _norm_backward(dn: Tensor, n: Tensor, rstd: Tensor) -> Tensor:
    """Gradient of n = x · rsqrt(mean x² + eps): rstd (dn − n mean(dn n)). Overwrites nothing."""
    return torch.addcmul(dn, n, (dn * n).mean(-1, keepdim=True), value=-1.0).mul_(rstd)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        xf = wide(x)
        rstd = (xf * xf).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return (xf * rstd).to(x.dtype) * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        dy = wide(grad_outputs[0])
        n = wide(x) * rstd
        dw = None
        if ctx.needs_input_grad[1]:
            dw = (dy * n).flatten(0, -2).sum(0).to(weight.dtype)
        dx = _norm_backward(dy * weight.to(dy.dtype), n, rstd).to(x.dtype) if ctx.needs_input_grad[0] else None
        return dx, dw, None


class _L2Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, eps: float) -> Tensor:
        xf = wide(x)
        rnorm = (xf * xf).sum(-1, keepdim=True).add_(eps).rsqrt_()
        y = xf * rnorm
        ctx.save_for_backward(y, rnorm)
        ctx.scale, ctx.dtype = scale, x.dtype
        return y if scale == 1.0 else y * scale

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        y, rnorm = ctx.saved_tensors
        dy = grad_outputs[0]
        along = (dy * y).sum(-1, keepdim=True)
        dx = torch.addcmul(dy, y, along, value=-1.0).mul_(rnorm if ctx.scale == 1.0 else rnorm * ctx.scale)
        return dx.to(ctx.dtype), None, None


class _GatedRmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
        of = wide(o)
        rstd = (of * of).mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(o, weight, gate, rstd)
        return (of * rstd).mul_(weight.to(of.dtype)).mul_(torch.sigmoid(wide(gate))).to(gate.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        o, weight, gate, rstd = ctx.saved_tensors
        dy = wide(grad_outputs[0])
        n = wide(o) * rstd
        sig = torch.sigmoid(wide(gate))
        w = weight.to(dy.dtype)
        dys = dy * sig
        dw = (dys * n).flatten(0, -2).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        dn = dys.mul_(w)
        do = _norm_backward(dn, n, rstd).to(o.dtype)
        dgate = dn.mul_(n).mul_(1.0 - sig).to(gate.dtype)
        return do, dw, dgate, None


def rms_norm_train(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` for training: x[..., D], weight[D]; differentiable in both (first order)."""
    return _RmsNorm.apply(x, weight, eps)


def l2_norm_train(x: Tensor, *, scale: float = 1.0, eps: float = 1e-6) -> Tensor:
    """scale · x / sqrt(sum(x²) + eps) over the last axis, in fp32; differentiable in x (first order)."""
    return _L2Norm.apply(x, scale, eps)


def gated_rms_norm_train(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """`gated_rms_norm` for training; differentiable in o, weight and gate (first order)."""
    return _GatedRmsNorm.apply(o, weight, gate, eps)
