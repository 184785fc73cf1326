"""Runs graders so that nothing they do ends a run: raising, hanging and NaN become the reason of an outcome.

A plain grader runs in a thread of its own, since a loop inside it could not be interrupted; one that hangs is left
behind as a daemon thread, and the run goes on. Tasks whose grader cannot hang say so (`grades_inline`).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import threading
from collections.abc import Awaitable
from typing import Any, cast

from tidemill.agent.task import Attempt, Grade, Problem, Task, Verdict
from tidemill.core.errors import TidemillError


class GraderError(TidemillError):
    """A grader raised, hung or returned something that is no reward. The episode is an infrastructure error."""


async def grade(task: Task, problem: Problem, attempt: Attempt, *, timeout_s: float) -> Verdict:
    """The task's verdict. Raises GraderError, SandboxError."""
    try:
        async with asyncio.timeout(timeout_s):
            raw = await _call(task, problem, attempt)
    except TimeoutError as e:
        if isinstance(e, TidemillError):
            raise
        raise GraderError(f"grader of {task.name or type(task).__name__} took longer than {timeout_s:g} s") from e
    return _verdict(raw)


async def _call(task: Task, problem: Problem, attempt: Attempt) -> Any:
    try:
        if inspect.iscoroutinefunction(task.grade):
            return await cast("Awaitable[Grade]", task.grade(problem, attempt))
        return task.grade(problem, attempt) if task.grades_inline else await _in_thread(task, problem, attempt)
    except TidemillError:
        raise
    except Exception as e:
        raise GraderError(f"grader raised {type(e).__name__}: {e}") from e


async def _in_thread(task: Task, problem: Problem, attempt: Attempt) -> Any:
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(error)

    def work() -> None:
        value, error = None, None
        try:
            value = task.grade(problem, attempt)
        except Exception as e:  # noqa: BLE001 - handed to the awaiting side as it is
            error = e
        try:
            loop.call_soon_threadsafe(settle, value, error)
        except RuntimeError:
            # The loop was closed while a hanging grader was left behind: nobody waits for its result.
            return

    threading.Thread(target=work, name="tidemill-grader", daemon=True).start()
    return await done


def _verdict(raw: Any) -> Verdict:
    if isinstance(raw, bool):
        return Verdict(reward=float(raw), correct=raw)
    if isinstance(raw, (int, float)):
        verdict = Verdict(reward=float(raw), correct=raw >= 1.0)
    elif isinstance(raw, Verdict):
        verdict = raw
    else:
        raise GraderError(f"grader returned a {type(raw).__name__}, expected a Verdict, a number or a bool")
    if not math.isfinite(verdict.reward):
        raise GraderError(f"grader returned the reward {verdict.reward}")
    return verdict
