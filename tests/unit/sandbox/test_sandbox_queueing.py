"""Fair turns: bounded, in rotation over leases, and intact under cancellation."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.core.errors import BusyError
from tidemill.sandbox.queueing import FairQueue


def test_leases_take_turns() -> None:
    async def main() -> list[str]:
        queue, order = FairQueue(1), list[str]()

        async def work(lease: str) -> None:
            async with queue.turn(lease):
                order.append(lease)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(lease) for lease in "aaaaabb" + "c"))
        assert (queue.active, queue.waiting) == (0, 0)
        return order

    assert "".join(asyncio.run(main())) == "aabcabaa"


def test_a_full_queue_refuses() -> None:
    async def main() -> None:
        queue = FairQueue(1, max_waiting=1)
        async with queue.turn("a"):
            waiting = asyncio.create_task(queue._acquire("a"))
            await asyncio.sleep(0)
            with pytest.raises(BusyError):
                await queue._acquire("b")
        await waiting
        queue._release()
        assert (queue.active, queue.waiting) == (0, 0)

    asyncio.run(main())
    with pytest.raises(ValueError, match="workers = 0"):
        FairQueue(0)


@settings(max_examples=60, deadline=None)
@given(workers=st.integers(1, 3), jobs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3),
                                                          st.one_of(st.none(), st.integers(0, 6))), max_size=24))
def test_never_too_many_and_nothing_lost_under_cancellation(
        workers: int, jobs: list[tuple[str, int, int | None]]) -> None:
    async def main() -> None:
        queue, done, active = FairQueue(workers), Counter[str](), 0

        async def work(lease: str, ticks: int) -> None:
            nonlocal active
            async with queue.turn(lease):
                active += 1
                assert active <= workers
                try:
                    for _ in range(ticks):
                        await asyncio.sleep(0)
                    done[lease] += 1
                finally:
                    active -= 1

        async def cancel_later(task: asyncio.Task[None], ticks: int) -> None:
            for _ in range(ticks):
                await asyncio.sleep(0)
            task.cancel()

        tasks = [asyncio.create_task(work(lease, ticks)) for lease, ticks, _ in jobs]
        killers = [asyncio.create_task(cancel_later(task, cancel))
                   for task, (_, _, cancel) in zip(tasks, jobs, strict=True) if cancel is not None]
        results = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        await asyncio.gather(*killers)
        assert (queue.active, queue.waiting, queue._waiting) == (0, 0, {})
        assert all(r is None or isinstance(r, asyncio.CancelledError) for r in results)
        assert done.total() == sum(r is None for r in results)

    asyncio.run(main())
