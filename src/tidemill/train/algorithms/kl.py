"""Estimators of KL(mu || p) on tokens sampled from mu, with d = log p - log mu.

Source: John Schulman, "Approximating KL divergence".
"""

from __future__ import annotations

import torch
from torch import Tensor


def _difference(logp: Tensor, logp_mu: Tensor, mask: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=logp.dtype)
    inside = mask.bool()
    return torch.where(inside, logp, zero) - torch.where(inside, logp_mu, zero)


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return (values * mask.to(values.dtype)).sum() / mask.sum().clamp(min=1)


def kl_k1(logp: Tensor, logp_mu: Tensor, mask: Tensor) -> Tensor:
    """Mean of -d: unbiased, high variance, may be negative."""
    return _mean(-_difference(logp, logp_mu, mask), mask)


def kl_k2(logp: Tensor, logp_mu: Tensor, mask: Tensor) -> Tensor:
    """Mean of d^2 / 2: biased, low variance."""
    return _mean(_difference(logp, logp_mu, mask).square() / 2, mask)


def kl_k3(logp: Tensor, logp_mu: Tensor, mask: Tensor) -> Tensor:
    """Mean of exp(d) - 1 - d: unbiased, never negative."""
    d = _difference(logp, logp_mu, mask)
    return _mean(torch.expm1(d) - d, mask)
