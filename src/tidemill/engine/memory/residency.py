"""Which sequence holds which state slot and pages. Decides who must give way; computes nothing and owns no tensors.

A resident sequence is *pinned* while its request runs and *evictable* otherwise (an idle session, or one whose next
request still waits). Evictable residency is a cache: it is dropped, least recently used first, whenever a pinned
sequence needs room, and recomputed from the log later to the same bits.
"""

from __future__ import annotations

import numpy as np

from tidemill.core.errors import EngineError
from tidemill.engine.config import PAGE_SIZE, MemoryPlan
from tidemill.engine.memory.free_list import FreeList
from tidemill.engine.request import Sequence


class Residency:
    """Slots, pages and the page table.

    page_table[num_slots, pages_per_sequence] int64: page ids of the sequence in that slot; entries past its last page
    are 0. `fresh_slots` and `fresh_pages` are places handed out and not yet cleared: the runner clears them before
    their first use. `freed_slots` and `freed_pages` are places that became free since it last looked (for poisoning).
    """

    def __init__(self, plan: MemoryPlan) -> None:
        self.slots = FreeList("state slots", plan.num_slots)
        self.pages = FreeList("pages", plan.num_pages)
        self.page_table = np.zeros((plan.num_slots, plan.pages_per_sequence), dtype=np.int64)
        self.fresh_slots: list[int] = []
        self.fresh_pages: list[int] = []
        self.freed_slots: list[int] = []
        self.freed_pages: list[int] = []
        self.num_evicted = 0
        self._evictable: dict[str, Sequence] = {}
        self._evictable_pages = 0
        self._pinned: dict[str, Sequence] = {}

    def pin(self, sequence: Sequence, tokens: int, *, reserve: int = 0) -> bool:
        """Make `sequence` resident with pages for `tokens` tokens and keep it so. All or nothing: False (and nothing
        changed) if slot and pages cannot be had together while `reserve` pages stay free or evictable.
        """
        missing = self._missing_pages(sequence, tokens)
        slot_wanted = 0 if sequence.resident else 1
        evictable = sequence.key in self._evictable
        others = len(self._evictable) - evictable
        other_pages = self._evictable_pages - (len(sequence.pages) if evictable else 0)
        if self.slots.num_free + others < slot_wanted or self.pages.num_free + other_pages < missing + reserve:
            return False
        self._forget_evictable(sequence)
        self._make_room(slot_wanted, missing)
        if slot_wanted:
            (sequence.slot,) = self.slots.take(1)
            sequence.computed = 0
            self.fresh_slots.append(sequence.slot)
        self._give_pages(sequence, missing)
        self._pinned[sequence.key] = sequence
        return True

    def extend(self, sequence: Sequence, tokens: int) -> bool:
        """Give a pinned sequence pages for `tokens` tokens, evicting others if need be. False if there are none."""
        missing = self._missing_pages(sequence, tokens)
        if missing <= 0:
            return True
        if not self._make_room(0, missing):
            return False
        self._give_pages(sequence, missing)
        return True

    def unpin(self, sequence: Sequence) -> None:
        """From now on `sequence` may be evicted; it is the most recently used."""
        if self._pinned.pop(sequence.key, None) is not None:
            self._evictable[sequence.key] = sequence
            self._evictable_pages += len(sequence.pages)

    def drop(self, sequence: Sequence) -> None:
        """Free slot and pages at once. Its log stays; idempotent."""
        self._pinned.pop(sequence.key, None)
        self._forget_evictable(sequence)
        if sequence.slot >= 0:
            self.page_table[sequence.slot] = 0
            self.freed_slots += self.slots.release([sequence.slot])
            self.freed_pages += self.pages.release(sequence.pages)
        sequence.slot, sequence.computed, sequence.pages = -1, 0, []

    def drop_all(self) -> None:
        """Free everything (new weights, sleep). Logs stay."""
        for sequence in [*self._pinned.values(), *self._evictable.values()]:
            self.drop(sequence)

    def check(self) -> None:
        """Raise EngineError if an invariant is broken: free + used == total, every place has exactly the holders that
        the sequences say, and the page table agrees."""
        self.slots.check()
        self.pages.check()
        sequences = [*self._pinned.values(), *self._evictable.values()]
        slots = [s.slot for s in sequences]
        pages = [p for s in sequences for p in s.pages]
        if len(set(slots)) != len(slots) or -1 in slots or len(slots) != self.slots.num_used:
            raise EngineError(f"state slots: {len(slots)} held, {self.slots.num_used} used, {sorted(slots)}")
        if len(set(pages)) != len(pages) or len(pages) != self.pages.num_used:
            raise EngineError(f"pages: {len(pages)} held, {self.pages.num_used} used")
        if self._evictable_pages != sum(len(s.pages) for s in self._evictable.values()):
            raise EngineError(f"{self._evictable_pages} evictable pages counted, but they are others")
        for s in sequences:
            if list(self.page_table[s.slot, : len(s.pages)]) != s.pages:
                raise EngineError(f"page table of slot {s.slot} does not list the pages of {s.key}")
            if s.computed > len(s.pages) * PAGE_SIZE or s.computed > len(s.ids):
                raise EngineError(f"{s.key}: {s.computed} tokens computed, {len(s.pages)} pages, {len(s.ids)} tokens")

    def _forget_evictable(self, sequence: Sequence) -> None:
        if self._evictable.pop(sequence.key, None) is not None:
            self._evictable_pages -= len(sequence.pages)

    def _missing_pages(self, sequence: Sequence, tokens: int) -> int:
        return max(0, -(-tokens // PAGE_SIZE) - len(sequence.pages))

    def _make_room(self, slots: int, pages: int) -> bool:
        while self.slots.num_free < slots or self.pages.num_free < pages:
            if not self._evictable:
                return False
            self.drop(next(iter(self._evictable.values())))
            self.num_evicted += 1
        return True

    def _give_pages(self, sequence: Sequence, n: int) -> None:
        if n <= 0:
            return
        new = self.pages.take(n)
        have = len(sequence.pages)
        self.page_table[sequence.slot, have : have + n] = new
        sequence.pages += new
        self.fresh_pages += new
