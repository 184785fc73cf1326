"""Which rows the next forward computes: continuous batching, first come first served.

One step mixes decode rows and prefill chunks under `max_batched_tokens`. Order of service is arrival order
everywhere: running requests first, then the head of the queue (nobody overtakes it). A request enters only if a state
slot and pages for all its known tokens can be had together. If a running request needs a page and none can be
evicted, the youngest running request loses its residency and waits again; since its log is complete it later computes
the same bits. The oldest request can therefore always finish: the plan holds at least one sequence of maximal length.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from tidemill.core.errors import BusyError
from tidemill.engine.config import EngineConfig
from tidemill.engine.memory.residency import Residency
from tidemill.engine.request import Phase, Request


@dataclass(frozen=True, slots=True)
class Work:
    """Compute tokens [start, start + count) of a request's log in this step."""

    request: Request
    start: int
    count: int

    @property
    def reaches_end(self) -> bool:
        """Whether the last known token is computed, so that one can be sampled."""
        return self.start + self.count == len(self.request.sequence.ids)


class Scheduler:
    """Queues of one engine. Mutates requests' phase and the residency of their sequences, nothing else."""

    def __init__(self, config: EngineConfig, residency: Residency) -> None:
        self._config = config
        self._residency = residency
        self.waiting: list[Request] = []
        """By arrival."""
        self.running: list[Request] = []
        """By arrival."""
        self.num_preempted = 0
        self._arrivals = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def check_room(self) -> None:
        """Raise BusyError if the queue is full."""
        if len(self.waiting) >= self._config.max_waiting:
            raise BusyError(f"{len(self.waiting)} requests are waiting (max_waiting = {self._config.max_waiting})",
                            remedy="Retry later.")

    def add(self, request: Request) -> None:
        """Queue a request. Raises BusyError if the queue is full."""
        self.check_room()
        self._arrivals += 1
        request.arrival, request.phase = self._arrivals, Phase.WAITING
        self.waiting.append(request)

    def schedule(self) -> list[Work]:
        """Choose the next step's work and pin what it needs. Empty if there is nothing to do."""
        budget = self._config.max_batched_tokens
        chunk = self._config.prefill_chunk
        works: list[Work] = []
        prefills: list[Request] = []
        for request in list(self.running):
            if request.phase is not Phase.RUNNING:
                continue  # lost its place to an older one in this very loop
            sequence, target = request.sequence, request.target
            if target - sequence.computed > 1:
                prefills.append(request)
            elif self._grow(request, target):
                works.append(Work(request, sequence.computed, 1))
                budget -= 1
        for request in prefills:
            if request.phase is not Phase.RUNNING:
                continue
            if budget <= 0:
                return works
            budget -= self._add_chunk(works, request, min(budget, chunk))
        while self.waiting and budget > 0 and len(self.running) < self._config.max_running:
            request = self.waiting[0]
            reserve = (len(self.running) + 7) // 8  # room for the next pages of those that decode already
            if not self._residency.pin(request.sequence, len(request.sequence.ids), reserve=reserve):
                break
            self.waiting.pop(0)
            request.phase = Phase.RUNNING
            insort(self.running, request, key=_arrival)
            budget -= self._add_chunk(works, request, min(budget, chunk))
        return works

    def finish(self, request: Request, *, keep: bool) -> None:
        """Take a request out. `keep` leaves its sequence resident (evictable); else slot and pages are freed."""
        queue = self.running if request.phase is Phase.RUNNING else self.waiting
        queue.remove(request)
        request.phase = Phase.DONE
        if keep:
            self._residency.unpin(request.sequence)
        else:
            self._residency.drop(request.sequence)

    def preempt(self, request: Request) -> None:
        """Send a running request back to the queue, without residency. It will recompute from its log."""
        self.running.remove(request)
        self._residency.drop(request.sequence)
        request.phase = Phase.WAITING
        insort(self.waiting, request, key=_arrival)
        self.num_preempted += 1

    def preempt_all(self) -> None:
        """Everybody waits again and nothing is resident (new weights, sleep)."""
        for request in list(self.running):
            self.preempt(request)
        self._residency.drop_all()

    def _grow(self, request: Request, tokens: int) -> bool:
        while not self._residency.extend(request.sequence, tokens):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is request:
                return False
        return True

    def _add_chunk(self, works: list[Work], request: Request, limit: int) -> int:
        sequence = request.sequence
        count = min(limit, request.target - sequence.computed)
        if count > 0 or request.target == sequence.computed:
            works.append(Work(request, sequence.computed, count))
        return count


def _arrival(request: Request) -> int:
    return request.arrival
