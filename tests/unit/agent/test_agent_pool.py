"""The pool lends each sandbox to one episode at a time, clean, and leaves none behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.agent.pool import SandboxPool
from tidemill.core.errors import ConfigError, SandboxError


@pytest.mark.parametrize("bad", [{"size": 0, "lease": "x"}, {"size": 1, "lease": ""}])
def test_sizes(service: Any, bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SandboxPool(service, **bad)


def test_lending_resets_and_counts(service: Any) -> None:
    async def main() -> SandboxPool:
        async with SandboxPool(service, size=2, lease="run", sessions=("python",)) as pool:
            for _ in range(5):
                async with pool.lend() as bench:
                    assert (await bench.run("python", "dirt")).exit_code == 1, "no variable of earlier use"
                    await bench.run("python", "dirt = 1")
                    pool.stats.note_tool(0.5)
                await pool.settle()
            calls = service.calls
            async with pool.lend() as bench:
                await bench.run("python", "1")
            await pool.settle()
            assert service.calls - calls == 3, "one run, one reset, one session: nothing else"
        return pool

    pool = asyncio.run(main())
    assert (pool.stats.uses, pool.stats.resets, pool.stats.replaced, pool.stats.sandboxes_used) == (6, 6, 0, 2)
    assert (pool.stats.tool_calls, pool.stats.tool_s, pool.stats.tool_max_s) == (5, 2.5, 0.5)
    assert service.alive == set()


def test_first_come_first_served(service: Any) -> None:
    async def main() -> list[int]:
        order: list[int] = []
        async with SandboxPool(service, size=1, lease="run") as pool:
            async def use(number: int) -> None:
                async with pool.lend():
                    order.append(number)
                    await asyncio.sleep(0)

            await asyncio.gather(*(use(i) for i in range(8)))
        return order

    assert asyncio.run(main()) == list(range(8))


def test_failed_reset_is_replaced(service: Any) -> None:
    service.fail_reset = lambda sandbox_id: sandbox_id == "sb-1"

    async def main() -> SandboxPool:
        async with SandboxPool(service, size=1, lease="run") as pool:
            names = []
            for _ in range(3):
                async with pool.lend() as bench:
                    names.append(bench.sandbox.sandbox_id)
            await pool.settle()
            assert names == ["sb-1", "sb-2", "sb-2"]
            assert {s.sandbox_id for s in service.alive} == {"sb-2"}
        return pool

    assert asyncio.run(main()).stats.replaced == 1
    assert service.alive == set()


def test_pool_that_lost_everything_says_so(service: Any) -> None:
    service.fail_reset = lambda sandbox_id: True
    service.fail_create = lambda number: number > 1

    async def main() -> None:
        async with SandboxPool(service, size=1, lease="run") as pool:
            first = await pool.acquire()
            waiting = asyncio.ensure_future(pool.acquire())
            await asyncio.sleep(0)
            pool.release(first)
            with pytest.raises(SandboxError, match="no sandbox is left in the pool: no room"):
                await waiting
            with pytest.raises(SandboxError, match="no sandbox is left"):
                await pool.acquire()

    asyncio.run(main())
    assert service.alive == set()


def test_failed_start_leaves_nothing(service: Any) -> None:
    service.fail_create = lambda number: number == 3

    async def main() -> None:
        with pytest.raises(SandboxError, match="no room"):
            async with SandboxPool(service, size=4, lease="run"):
                pytest.fail("the pool was entered")

    asyncio.run(main())
    assert service.made >= 3
    assert service.alive == set()


def test_closing_under_cancellation_ends_everything(service: Any) -> None:
    async def hold() -> None:
        async with SandboxPool(service, size=3, lease="run") as pool:
            await pool.acquire()
            pool.release(await pool.acquire())
            await asyncio.sleep(30)

    async def main() -> None:
        task = asyncio.ensure_future(hold())
        while len(service.alive) < 3:
            await asyncio.sleep(0)
        for _ in range(6):
            task.cancel()
            await asyncio.sleep(0)
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert service.alive == set()


def test_closed_pool_refuses_and_wakes_the_waiting(service: Any) -> None:
    async def main() -> None:
        pool = SandboxPool(service, size=1, lease="run")
        async with pool:
            bench = await pool.acquire()
            waiting = asyncio.ensure_future(pool.acquire())
            await asyncio.sleep(0)
        with pytest.raises(SandboxError, match="closed"):
            await waiting
        with pytest.raises(SandboxError, match="closed"):
            await pool.acquire()
        pool.release(bench)
        await pool.close()

    asyncio.run(main())


PLAN = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.booleans()), min_size=1, max_size=24)


@given(size=st.integers(1, 4), plan=PLAN, bad_resets=st.sets(st.integers(0, 12), max_size=6))
def test_exclusive_clean_and_none_lost(size: int, plan: list[tuple[int, int, bool]], bad_resets: set[int]) -> None:
    """Users that start, hold, fail and are cancelled in any pattern, while resets fail: no sandbox is ever in two hands
    or dirty, and afterwards all are free again."""
    from_conftest = SERVICE()
    resets = iter(range(10_000))
    from_conftest.fail_reset = lambda sandbox_id: next(resets) in bad_resets
    held: set[str] = set()

    async def user(pool: SandboxPool, start: int, hold: int, fail: bool) -> None:
        for _ in range(start):
            await asyncio.sleep(0)
        async with pool.lend() as bench:
            name = bench.sandbox.sandbox_id
            assert name not in held, "in two hands"
            assert not bench.sandbox.dirt, "not reset"
            held.add(name)
            bench.sandbox.dirt = True
            try:
                for _ in range(hold):
                    await asyncio.sleep(0)
                if fail:
                    raise SandboxError("the episode failed")
            finally:
                held.discard(name)

    async def main() -> None:
        async with SandboxPool(from_conftest, size=size, lease="run") as pool:
            tasks = [asyncio.ensure_future(user(pool, *row)) for row in plan]
            for number, task in enumerate(tasks):
                if plan[number][1] == 3:
                    await asyncio.sleep(0)
                    task.cancel()
            done = await asyncio.gather(*tasks, return_exceptions=True)
            assert not [e for e in done if isinstance(e, AssertionError)]
            await pool.settle()
            assert (pool.free, pool.lent, held) == (size, 0, set())
            assert len(from_conftest.alive) == size

    asyncio.run(main())
    assert from_conftest.alive == set()


SERVICE: Any = None


@pytest.fixture(autouse=True, scope="module")
def _service_type(request: pytest.FixtureRequest) -> None:
    """Hypothesis makes many services in one test, so it needs the class."""
    global SERVICE
    SERVICE = request.getfixturevalue("service_type")
