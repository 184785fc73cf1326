"""Sleep and wake: give the memory of pools and derived buffers back to the system and prove it by resident memory."""

from __future__ import annotations

from collections.abc import Sequence

from tidemill.core.engine_api import SleepReport
from tidemill.core.errors import BusyError, EngineError, InputError
from tidemill.engine.config import format_bytes
from tidemill.engine.memory.limits import resident_bytes
from tidemill.engine.memory.pools import Pools
from tidemill.engine.weights import EngineWeights

TAGS = ("pools", "derived")
_NOISE_BYTES = 8 << 20
"""Other threads of the process may allocate this much while we measure."""
_SAMPLED_TENSORS = 4
"""Base tensors hashed again at each wake; successive wakes go round the whole base."""


class Sleeper:
    """Which memory is given back. Callers see to it that nothing is resident in the pools when they sleep."""

    def __init__(self, pools: Pools, weights: EngineWeights) -> None:
        self._pools, self._weights = pools, weights
        self._asleep: set[str] = set()
        self._names: list[str] = []

    @property
    def asleep(self) -> bool:
        return bool(self._asleep)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(t for t in TAGS if t in self._asleep)

    def check(self, tags: Sequence[str]) -> None:
        """Raise InputError on an unknown tag or none, BusyError if one of them sleeps already."""
        unknown = [t for t in tags if t not in TAGS]
        if unknown or not tags:
            raise InputError(f"tags = {list(tags)}: expected some of {list(TAGS)}", field="tags")
        twice = [t for t in tags if t in self._asleep]
        if twice:
            raise BusyError(f"{', '.join(twice)} asleep already", remedy="Wake first.")

    def sleep(self, tags: Sequence[str]) -> SleepReport:
        """Release. Raises EngineError if the system does not show the memory as returned."""
        self.check(tags)
        expected = 0
        before = resident_bytes()
        if "pools" in tags:
            expected += self._pools.arena.resident_bytes()
            self._pools.arena.release()
        if "derived" in tags:
            expected += self._weights.derived.resident_bytes
            self._weights.derived.drop()
        after = resident_bytes()
        self._asleep |= set(tags)
        report = SleepReport(tags=tuple(tags), freed_bytes=before - after, expected_bytes=expected, rss_before=before,
                             rss_after=after)
        if report.freed_bytes + _NOISE_BYTES < expected:
            raise EngineError(f"sleep freed {format_bytes(report.freed_bytes)} of resident memory, expected "
                              f"{format_bytes(expected)}")
        return report

    def wake(self, tags: Sequence[str]) -> SleepReport:
        """Make derived buffers again and hash some base tensors. Pools take memory when they are used.

        Raises BusyError if one of the tags is awake, IntegrityError (and stays asleep) if the base has changed.
        """
        unknown = [t for t in tags if t not in TAGS]
        if unknown or not tags:
            raise InputError(f"tags = {list(tags)}: expected some of {list(TAGS)}", field="tags")
        awake = [t for t in tags if t not in self._asleep]
        if awake:
            raise BusyError(f"{', '.join(awake)} not asleep")
        before = resident_bytes()
        expected = 0
        self._weights.source.verify(self._next_names())
        if "derived" in tags:
            self._weights.derived.rebuild()
            expected = self._weights.derived.resident_bytes
        self._asleep -= set(tags)
        after = resident_bytes()
        return SleepReport(tags=tuple(tags), freed_bytes=before - after, expected_bytes=-expected, rss_before=before,
                           rss_after=after)

    def _next_names(self) -> list[str]:
        if len(self._names) < _SAMPLED_TENSORS:
            self._names += self._weights.source.file_names()
        chosen, self._names = self._names[:_SAMPLED_TENSORS], self._names[_SAMPLED_TENSORS:]
        return chosen
