"""Per-token policy losses, to be minimised. Sources: PPO, DAPO (clip-higher), dual-clip PPO.

All take log-probs in fp32 at the sampling temperature and return [B, T]; positions outside the mask are exactly 0 and
are removed before any product, so a NaN there cannot leak.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.core.errors import InputError

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to +-20 before exp."""


@dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """Which loss, and its constants."""

    name: str = "clip"
    clip_low: float = 0.2
    """e_lo: the ratio is clipped at 1 - e_lo."""
    clip_high: float = 0.28
    """e_hi: the ratio is clipped at 1 + e_hi (DAPO: larger than e_lo)."""
    dual_clip: float = 3.0
    """c > 1 of `dual_clip`: for A < 0 the loss is at most -c A."""


def log_ratio(logp: Tensor, logp_old: Tensor, mask: Tensor) -> Tensor:
    """log(p / p_old) inside the mask, 0 outside, clamped to +-MAX_LOG_RATIO."""
    zero = torch.zeros((), dtype=logp.dtype)
    inside = mask.bool()
    diff = torch.where(inside, logp, zero) - torch.where(inside, logp_old, zero)
    return diff.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)


def clip(logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor, settings: PolicyLoss) -> Tensor:
    """max(-rho A, -clip(rho, 1 - e_lo, 1 + e_hi) A)."""
    ratio = log_ratio(logp, logp_old, mask).exp()
    adv = torch.where(mask.bool(), advantages, torch.zeros((), dtype=advantages.dtype))
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.maximum(-ratio * adv, -clipped * adv)


def dual_clip(logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor, settings: PolicyLoss) -> Tensor:
    """`clip`, and for A < 0 at most -c A."""
    loss = clip(logp, logp_old, advantages, mask, settings)
    adv = torch.where(mask.bool(), advantages, torch.zeros((), dtype=advantages.dtype))
    return torch.where(adv < 0, torch.minimum(loss, -settings.dual_clip * adv), loss)


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor, PolicyLoss], Tensor]] = {
    "clip": clip, "dual_clip": dual_clip,
}


def policy_loss(logp: Tensor, logp_old: Tensor, advantages: Tensor, mask: Tensor, settings: PolicyLoss) -> Tensor:
    """Token losses [B, T] of the loss named in `settings`. logp_old and advantages carry no gradient."""
    try:
        loss = LOSSES[settings.name]
    except KeyError:
        raise InputError(f"loss = {settings.name!r}: expected one of {', '.join(LOSSES)}", field="loss") from None
    return loss(logp, logp_old.detach(), advantages.detach(), mask, settings)
