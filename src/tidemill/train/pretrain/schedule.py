"""The learning rate over a training: linear warm-up, then a cosine, or a plateau with a linear end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tidemill.core.config import require, strict_config

MAX_STEPS = 99_999


@strict_config
@dataclass(frozen=True, kw_only=True)
class ScheduleSection:
    """Shares are of `steps`.

    cosine  from the peak down to `floor` of it over all steps after the warm-up
    wsd     the peak until the last `decay` of the steps, then linear down to `floor` of it
    """

    kind: Literal["cosine", "wsd"] = "cosine"
    steps: int
    """Optimizer steps of the whole training."""
    warmup: float = 0.01
    decay: float = 0.2
    floor: float = 0.0

    def __post_init__(self) -> None:
        require(1 <= self.steps <= MAX_STEPS, field="steps", value=self.steps, expected=f"1 to {MAX_STEPS}")
        for name in ("warmup", "decay", "floor"):
            value = getattr(self, name)
            require(0 <= value <= 1, field=name, value=value, expected="a share from 0 to 1")

    def share(self, step: int) -> float:
        """Learning rate of a 1-based step as a share of the peak."""
        ramp = max(1, math.ceil(self.warmup * self.steps))
        if step < ramp:
            return step / ramp
        if self.kind == "cosine":
            done = (step - ramp) / max(1, self.steps - ramp)
            return self.floor + (1 - self.floor) * 0.5 * (1 + math.cos(math.pi * done))
        length = max(1, math.ceil(self.decay * self.steps))
        left = (self.steps - step + 1) / (length + 1)
        return min(1.0, self.floor + (1 - self.floor) * left)
