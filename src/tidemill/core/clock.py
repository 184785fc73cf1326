"""Clocks as values, so that tests can set them and deadlines can count active time only."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol


class Clock(Protocol):
    """Seconds. `wall` is Unix time; `monotonic` never goes back."""

    def wall(self) -> float: ...

    def monotonic(self) -> float: ...


class SystemClock:
    """The machine's clocks."""

    def wall(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()


@dataclass
class ManualClock:
    """A clock that moves only when told; for tests."""

    now: float = 1_700_000_000.0

    def wall(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move both clocks forward."""
        self.now += seconds
