"""One episode's claim on a sandbox: asked for ahead, furnished with the problem's data, given back exactly once.

`want` starts getting it in the background while the policy goes on writing; `get` waits for it; `give_back` may come
at any time, also before it has arrived.
"""

from __future__ import annotations

import asyncio

from tidemill.agent.pool import SandboxPool
from tidemill.agent.task import Problem
from tidemill.agent.tool import Bench, ToolLimits
from tidemill.core.errors import SandboxError


class BenchLoan:
    """`pool` None: tools that need no sandbox still find a bench, without one."""

    def __init__(self, pool: SandboxPool | None, problem: Problem, limits: ToolLimits) -> None:
        self._pool, self._problem, self._limits = pool, problem, limits
        self._bench: asyncio.Task[Bench] | None = None
        self._stopping: set[asyncio.Task[Bench]] = set()

    def want(self) -> None:
        """Begin to get and furnish a bench, if that has not begun."""
        if self._bench is None:
            self._bench = asyncio.ensure_future(self._furnish())

    async def get(self) -> Bench:
        """The bench, the problem's setup done. Raises SandboxError."""
        self.want()
        assert self._bench is not None
        return await self._bench

    def give_back(self) -> None:
        """Let go of it; a later `get` would find another one. Idempotent."""
        task, self._bench = self._bench, None
        if task is None:
            return
        if task.done():
            self._release(task)
        else:
            task.cancel()
            task.add_done_callback(self._release)
            self._stopping.add(task)

    async def close(self) -> None:
        """`give_back`, and wait for what was on its way."""
        self.give_back()
        if self._stopping:
            await asyncio.wait(self._stopping)

    def _release(self, task: asyncio.Task[Bench]) -> None:
        if not task.cancelled() and task.exception() is None and self._pool is not None:
            self._pool.release(task.result())

    async def _furnish(self) -> Bench:
        pool, setup = self._pool, self._problem.setup
        if pool is None:
            if setup is not None:
                raise SandboxError("this problem is set up in a sandbox and the harness has no pool")
            return Bench(None, {}, self._limits)
        bench = await pool.acquire()
        try:
            if setup is not None:
                for path, data in setup.files.items():
                    await bench.sandbox.write_file(path, data)
                for kind, code in setup.code.items():
                    result = await bench.run(kind, code)
                    if result is None or result.exit_code != 0:
                        why = "the session had ended" if result is None else result.stderr.decode("utf-8", "replace")
                        raise SandboxError(f"setup of problem {self._problem.problem_id} failed: {why.strip()}")
        except BaseException:
            pool.release(bench)
            raise
        return bench
