"""Pointwise functions whose result for an element does not depend on where the element lies in the tensor.

torch.sigmoid, silu and softplus use another routine for the last elements of a buffer that do not fill a vector, so
an element's bits would depend on its offset. exp, log1p, division and tanh do not have that fault, so everything is
built from them. For inference: the results are made in place and carry no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """x in the dtype its reductions run in: fp32, or fp64 if it is fp64 already (gradient checks)."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in fp32, a new tensor of x's shape. Exact limits at ±inf."""
    return torch.neg(x.float()).exp_().add_(1.0).reciprocal_()


def silu(x: Tensor) -> Tensor:
    """x · sigmoid(x) in fp32, a new tensor of x's shape."""
    return sigmoid(x).mul_(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)) in fp32 as log1p(exp(-|x|)) + max(x, 0), a new tensor of x's shape."""
    x = x.float()
    return torch.abs(x).neg_().exp_().log1p_().add_(x.clamp_min(0.0))
