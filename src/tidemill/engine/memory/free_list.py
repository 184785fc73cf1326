"""Bookkeeping of numbered places (slots, pages): which are free, and how many holders each of the others has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tidemill.core.errors import EngineError


class FreeList:
    """`count` places 0..count-1. Every place is free or has at least one reference; free + used == count always.

    Lower numbers are handed out first, so that places taken together tend to lie together.
    """

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count
        self._free = list(range(count - 1, -1, -1))
        self._refs = np.zeros(count, dtype=np.int32)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.count - len(self._free)

    def take(self, n: int) -> list[int]:
        """n places with one reference each. Raises EngineError if fewer are free: callers ask `num_free` first."""
        if n > len(self._free):
            raise EngineError(f"{n} {self.name} wanted, {len(self._free)} free")
        taken = [self._free.pop() for _ in range(n)]
        self._refs[taken] = 1
        return taken

    def retain(self, places: Sequence[int]) -> None:
        """One more holder for each place. Raises EngineError if one is free."""
        for place in places:
            if self._refs[place] < 1:
                raise EngineError(f"{self.name} {place} is free and cannot be shared")
        for place in places:
            self._refs[place] += 1

    def release(self, places: Iterable[int]) -> list[int]:
        """One holder less; returns the places that became free. Raises EngineError if one already was (double free)."""
        freed: list[int] = []
        for place in places:
            if self._refs[place] < 1:
                raise EngineError(f"{self.name} {place} is freed twice")
            self._refs[place] -= 1
            if self._refs[place] == 0:
                self._free.append(place)
                freed.append(place)
        return freed

    def check(self) -> None:
        """Recount. Raises EngineError if the free list and the reference counts disagree."""
        free = set(self._free)
        if len(free) != len(self._free):
            raise EngineError(f"{self.name}: a place is on the free list twice")
        held = {int(i) for i in np.flatnonzero(self._refs)}
        if free & held or len(free) + len(held) != self.count or int(self._refs.min(initial=0)) < 0:
            raise EngineError(f"{self.name}: {len(free)} free + {len(held)} used != {self.count}")
