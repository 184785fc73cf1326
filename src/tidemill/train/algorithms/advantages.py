"""Advantages of one group of samples of the same prompt. Sources: GRPO (DeepSeekMath), Dr. GRPO, RLOO."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tidemill.core.errors import InputError

EPSILON = 1e-6
"""Added to the group's standard deviation."""
FLAT = 1e-8
"""A group whose standard deviation is below this carries no signal; its advantages are exactly 0."""


def grpo(rewards_G: Tensor) -> Tensor:
    """(R - mean) / (std + 1e-6) with the sample (n - 1) standard deviation; all zeros for a flat or single group."""
    centred = rewards_G - rewards_G.mean()
    if rewards_G.numel() < 2:
        return torch.zeros_like(rewards_G)
    std = rewards_G.std(unbiased=True)
    if std < FLAT:
        return torch.zeros_like(rewards_G)
    return centred / (std + EPSILON)


def dr_grpo(rewards_G: Tensor) -> Tensor:
    """R - mean, not divided by the standard deviation (use with aggregation `seq-mean-token-const`)."""
    return rewards_G - rewards_G.mean()


def rloo(rewards_G: Tensor) -> Tensor:
    """Each reward minus the mean of the others: G/(G-1) (R - mean); zeros for a single sample."""
    n = rewards_G.numel()
    if n < 2:
        return torch.zeros_like(rewards_G)
    return (rewards_G - rewards_G.mean()) * (n / (n - 1))


ADVANTAGES: dict[str, Callable[[Tensor], Tensor]] = {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo}


def group_advantages(name: str, rewards_G: Tensor) -> Tensor:
    """Advantages [G] of one group by estimator name. Rewards must be finite (InputError): a reward that is NaN is an
    infrastructure error and never reaches this point."""
    if not torch.isfinite(rewards_G).all():
        raise InputError(f"rewards = {rewards_G.tolist()}: must be finite", field="rewards")
    try:
        return ADVANTAGES[name](rewards_G.double()).to(rewards_G.dtype)
    except KeyError:
        raise InputError(f"advantage = {name!r}: expected one of {', '.join(ADVANTAGES)}", field="advantage") from None
