"""RMS and L2 normalisation over the last axis, statistics in fp32. Differentiable where torch is.

Rows must be contiguous for the row-invariance promise (a transposed layout changes the order of the sum).
"""

from __future__ import annotations

from torch import Tensor

from tidemill.kernels.pointwise import sigmoid


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight ⊙ cast(x / sqrt(mean(x²) + eps)) over the last axis; x[..., D], weight[D] -> x's shape and dtype.

    Statistics and scaling in fp32, cast to x's dtype **before** the gain is multiplied, as the K3 reference does.
    """
    xf = x.float()
    rstd = (xf * xf).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (xf * rstd).to(x.dtype) * weight.to(x.dtype)


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x²) + eps) over the last axis, in fp32. eps stands on the SUM, not on the mean."""
    xf = x.float()
    return xf * (xf * xf).sum(-1, keepdim=True).add_(eps).rsqrt_()


def gated_rms_norm(o: Tensor, weight: Tensor, gate: Tensor, eps: float) -> Tensor:
    """weight ⊙ o / sqrt(mean(o²) + eps) ⊙ sigmoid(gate) over the last axis.

    o[..., D] and gate[..., D] of one shape, weight[D]; everything in fp32, one cast to gate's dtype at the end.
    The gate is a sigmoid (not SiLU) and acts after the norm. For inference (the gate carries no gradient).
    """
    of = o.float()
    rstd = (of * of).mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (of * rstd).mul_(weight.float()).mul_(sigmoid(gate)).to(gate.dtype)
