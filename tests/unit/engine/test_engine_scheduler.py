"""Scheduler: mixing, order of service, joint admission, preemption."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tidemill.core.engine_api import SamplingParams
from tidemill.core.errors import BusyError
from tidemill.engine.config import EngineConfig, MemoryPlan
from tidemill.engine.memory.residency import Residency
from tidemill.engine.request import Phase, Request, Sequence
from tidemill.engine.scheduler import Scheduler, Work


class Bench:
    """A scheduler whose forward is imagined: computed tokens advance, requests that reach the end sample a 0."""

    def __init__(self, *, pages: int = 100, slots: int = 8, **config: int) -> None:
        self.config = EngineConfig(**({"max_running": 8, "max_batched_tokens": 64, "prefill_chunk": 32} | config))
        self.residency = Residency(MemoryPlan(
            num_slots=slots, num_pages=pages, pages_per_sequence=16, slot_bytes=1, page_bytes=1, budget_bytes=0,
            budget_source=""))
        self.scheduler = Scheduler(self.config, self.residency)
        self.num = 0

    def request(self, tokens: int, max_tokens: int = 1000, sequence: Sequence | None = None) -> Request:
        self.num += 1
        sequence = sequence or Sequence(key=f"s{self.num}")
        start = len(sequence.ids)
        sequence.ids += [0] * tokens
        request = Request(request_id=f"r{self.num}", call_id=self.num, sequence=sequence, stream=False, start=start,
                          prompt_end=len(sequence.ids), sampling=SamplingParams(max_tokens=max_tokens))
        self.scheduler.add(request)
        return request

    def step(self) -> list[tuple[str, int, int]]:
        works = self.scheduler.schedule()
        assert sum(w.count for w in works) <= self.config.max_batched_tokens
        for w in works:
            assert w.request.phase is Phase.RUNNING
            assert len(w.request.sequence.pages) * 64 >= w.start + w.count
            self._apply(w)
        self.residency.check()
        return [(w.request.request_id, w.start, w.count) for w in works]

    def _apply(self, w: Work) -> None:
        ended = w.reaches_end
        w.request.sequence.computed = w.start + w.count
        if ended and w.request.sampling.max_tokens:
            w.request.ids.append(0)
            w.request.sequence.ids.append(0)
            if len(w.request.ids) >= w.request.sampling.max_tokens:
                self.scheduler.finish(w.request, keep=False)


def test_decode_and_prefill_share_a_step_and_chunks_are_bounded() -> None:
    bench = Bench()
    bench.request(5)
    assert bench.step() == [("r1", 0, 5)]
    bench.request(100)
    bench.request(100)
    assert bench.step() == [("r1", 5, 1), ("r2", 0, 32), ("r3", 0, 31)]
    assert bench.step() == [("r1", 6, 1), ("r2", 32, 32), ("r3", 31, 31)]


def test_nobody_overtakes_the_head_of_the_queue() -> None:
    bench = Bench(pages=16)
    bench.request(64 * 10)
    bench.step()
    bench.request(64 * 8)  # does not fit beside the first
    bench.request(3)  # would fit
    bench.step()
    assert [r.request_id for r in bench.scheduler.waiting] == ["r2", "r3"]


def test_a_full_house_preempts_the_youngest_and_the_oldest_goes_on() -> None:
    bench = Bench(pages=17, slots=4, max_running=4)
    requests = [bench.request(60, max_tokens=900) for _ in range(4)]
    seen = 0
    for _ in range(4000):
        if not bench.scheduler.has_work:
            break
        bench.step()
        running = [r.arrival for r in bench.scheduler.running]
        assert running == sorted(running)
        if bench.scheduler.waiting and running:
            seen += 1
            assert max(running) < min(r.arrival for r in bench.scheduler.waiting)
    assert not bench.scheduler.has_work
    assert seen
    assert bench.scheduler.num_preempted
    assert all(len(r.ids) == 900 and r.phase is Phase.DONE for r in requests)
    assert bench.residency.pages.num_used == bench.residency.slots.num_used == 0


def test_admission_needs_slot_and_pages_together() -> None:
    bench = Bench(slots=8, pages=16, max_running=8)
    bench.request(64 * 15)
    bench.step()
    bench.request(64 * 2)
    bench.step()
    assert bench.residency.slots.num_used == 1  # no slot is held by the one that lacks pages
    assert [r.phase for r in bench.scheduler.waiting] == [Phase.WAITING]


def test_an_idle_session_is_evicted_for_a_new_request_and_kept_otherwise() -> None:
    bench = Bench(pages=16, slots=2, max_running=2)
    session = Sequence(key="session")
    first = bench.request(100, max_tokens=1, sequence=session)
    while bench.scheduler.has_work and first.phase is not Phase.DONE:
        works = bench.scheduler.schedule()
        for w in works:
            w.request.sequence.computed = w.start + w.count
        if works[-1].reaches_end:
            session.ids.append(0)
            bench.scheduler.finish(first, keep=True)
    assert session.resident
    again = bench.request(10, max_tokens=1, sequence=session)
    assert bench.step() == [(again.request_id, 100, 11)]
    bench.residency.check()


def test_a_waiting_requests_session_can_be_evicted() -> None:
    bench = Bench(pages=16, slots=1, max_running=1)
    idle = Sequence(key="idle", ids=[0] * 10)
    assert bench.residency.pin(idle, 10)
    bench.residency.unpin(idle)
    bench.request(10, max_tokens=1)
    later = bench.request(3, max_tokens=1, sequence=idle)
    assert bench.step() == [("r1", 0, 10)]
    assert not idle.resident
    assert bench.step() == [(later.request_id, 0, 13)]


def test_abort_frees_everything_in_any_phase() -> None:
    bench = Bench()
    running, waiting = bench.request(200), bench.request(200)
    bench.step()
    bench.scheduler.finish(running, keep=False)
    bench.scheduler.finish(waiting, keep=False)
    assert not bench.scheduler.has_work
    assert bench.residency.slots.num_used == bench.residency.pages.num_used == 0


def test_a_full_queue_is_busy() -> None:
    bench = Bench(max_waiting=2)
    bench.request(1)
    bench.request(1)
    with pytest.raises(BusyError, match="max_waiting = 2"):
        bench.request(1)


def test_prefill_only_stops_before_the_last_token() -> None:
    bench = Bench()
    request = bench.request(40, max_tokens=0)
    assert bench.step() == [("r1", 0, 32)]
    assert bench.step() == [("r1", 32, 7)]
    assert request.target == 39


def test_work_knows_whether_it_reaches_the_end() -> None:
    bench = Bench()
    request = bench.request(10)
    assert Work(request, 0, 10).reaches_end
    assert not replace(Work(request, 0, 10), count=9).reaches_end
