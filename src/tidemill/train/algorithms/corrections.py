"""Corrections for rollout and trainer not agreeing on a token's probability."""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.train.algorithms.losses import log_ratio


def truncated_importance_weights(logp_old: Tensor, logp_rollout: Tensor, mask: Tensor, *, cap: float) -> Tensor:
    """w = min(p_old / mu, cap) [B, T], detached, 1 outside the mask; multiplied into the token loss. cap <= 0: no
    correction (all ones)."""
    if cap <= 0:
        return torch.ones_like(logp_old)
    return log_ratio(logp_old, logp_rollout, mask).exp().clamp(max=cap).detach()
