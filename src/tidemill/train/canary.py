"""The canary: fixed token sequences scored by engine and trainer after every sync.

A manifest proves that bytes arrived; the canary proves that they are used. For each sequence both sides give log-probs
of the same tokens. The primary detector is co-movement: when the trainer's log-probs moved since the last version, the
engine's must have moved alike. The second is the level |engine - trainer|. All figures are nats per token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from tidemill.train.config import CanarySection

Curves = list[list[float]]
"""One list of log-probs per canary sequence."""

CO_MOVEMENT = 0.5
"""Share of the trainer's movement that the engine may miss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """One comparison. `fires` names the detector, or is empty."""

    version: int
    mean_diff: float
    max_diff: float
    k3: float
    trainer_moved: float
    engine_moved: float
    missed: float
    """Mean |trainer's change - engine's change|."""
    threshold: float
    fires: str

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass
class Canary:
    """Keeps the floor, the last curves and how often it fired in a row."""

    settings: CanarySection
    floor: float = 0.0
    repeatability: float = 0.0
    fired: int = 0
    last_trainer: Curves = field(default_factory=list)
    last_engine: Curves = field(default_factory=list)

    @property
    def threshold(self) -> float:
        """max(floor_factor x floor, repeat_factor x repeatability, absolute)."""
        s = self.settings
        return max(s.floor_factor * self.floor, s.repeat_factor * self.repeatability, s.absolute)

    def measure_floor(self, trainer: Curves, engine_runs: Sequence[Curves]) -> None:
        """At version 1 (the adapter is the identity): how far engine and trainer, and two engine runs, are apart."""
        self.floor = _median([_mean_abs(run, trainer) for run in engine_runs])
        pairs = [_mean_abs(a, b) for a, b in pairwise(engine_runs)]
        self.repeatability = max(pairs, default=0.0)

    def read(self, version: int, trainer: Curves, engine: Curves) -> CanaryReading:
        """Compare, remember, count. Non-finite log-probs on either side fire."""
        level, worst = _mean_abs(engine, trainer), _max_abs(engine, trainer)
        moved = _mean_abs(trainer, self.last_trainer) if self.last_trainer else 0.0
        engine_moved = _mean_abs(engine, self.last_engine) if self.last_engine else 0.0
        missed = 0.0
        if self.last_trainer:
            missed = _mean_abs(_difference(trainer, self.last_trainer), _difference(engine, self.last_engine))
        fires = ""
        if not math.isfinite(level):
            fires = "non-finite"
        elif moved > self.settings.moved_factor * self.threshold and missed > CO_MOVEMENT * moved:
            fires = "co-movement"
        elif level > self.threshold:
            fires = "level"
        self.fired = self.fired + 1 if fires else 0
        self.last_trainer, self.last_engine = trainer, engine
        return CanaryReading(version=version, mean_diff=level, max_diff=worst, k3=_k3(engine, trainer),
                             trainer_moved=moved, engine_moved=engine_moved, missed=missed, threshold=self.threshold,
                             fires=fires)

    @property
    def stops(self) -> bool:
        """Whether it fired often enough in a row to end the run."""
        return self.fired >= self.settings.consecutive

    def state(self) -> dict[str, Any]:
        """For checkpoints."""
        return {"floor": self.floor, "repeatability": self.repeatability, "fired": self.fired,
                "last_trainer": self.last_trainer, "last_engine": self.last_engine}

    def load_state(self, state: dict[str, Any]) -> None:
        self.floor, self.repeatability, self.fired = state["floor"], state["repeatability"], state["fired"]
        self.last_trainer, self.last_engine = state["last_trainer"], state["last_engine"]


def _flat(curves: Curves) -> list[float]:
    return [x for curve in curves for x in curve]


def _difference(a: Curves, b: Curves) -> Curves:
    return [[x - y for x, y in zip(p, q, strict=True)] for p, q in zip(a, b, strict=True)]


def _mean_abs(a: Curves, b: Curves) -> float:
    values = [abs(x) for x in _flat(_difference(a, b))]
    return sum(values) / max(1, len(values))


def _max_abs(a: Curves, b: Curves) -> float:
    return max((abs(x) for x in _flat(_difference(a, b))), default=0.0)


def _k3(engine: Curves, trainer: Curves) -> float:
    values = [math.expm1(min(20.0, -d)) + d for d in _flat(_difference(engine, trainer))]
    return sum(values) / max(1, len(values))


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
