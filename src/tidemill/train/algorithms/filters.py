"""DAPO's dynamic sampling and overlong penalty."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from tidemill.core.errors import InputError


class GroupFilter(StrEnum):
    """Why a group was kept or dropped."""

    KEPT = "kept"
    ALL_EQUAL = "all_equal"
    """Every reward is the same: no gradient."""
    TOO_SMALL = "too_small"
    """Fewer than two episodes are left after infrastructure failures."""


def keep_group(rewards: Sequence[float], *, min_std: float = 1e-8) -> GroupFilter:
    """Keep a group iff its rewards differ (population standard deviation above min_std)."""
    n = len(rewards)
    if n < 2:
        return GroupFilter.TOO_SMALL
    mean = sum(rewards) / n
    variance = sum((r - mean) ** 2 for r in rewards) / n
    return GroupFilter.KEPT if variance**0.5 > min_std else GroupFilter.ALL_EQUAL


def soft_overlong_penalty(length: int, *, max_length: int, buffer: int) -> float:
    """0 up to max_length - buffer sampled tokens, then linear down to -1 at max_length and beyond. buffer 0: none."""
    if buffer < 0 or buffer > max_length:
        raise InputError(f"overlong buffer = {buffer}: expected 0..{max_length}", field="overlong_buffer")
    if buffer == 0 or length <= max_length - buffer:
        return 0.0
    return max(-1.0, (max_length - buffer - length) / buffer)
