"""Many episodes at once. Results come in the order of the requests, whatever finished first; random numbers follow from
the request alone, so timing changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from tidemill.agent.episode import Draw, Episode, Harness, run_episode
from tidemill.agent.task import Problem


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRequest:
    """One episode to run. `episode_id` is unique among those under way and names the engine session."""

    episode_id: str
    problem: Problem
    draw: Draw


Play = Callable[[EpisodeRequest], Awaitable[Episode]]
"""Runs one episode; raises only for a bug or a cancellation."""


async def run_episodes(harness: Harness, requests: Sequence[EpisodeRequest], *, concurrency: int,
                       progress: Callable[[int, int], None] | None = None) -> list[Episode]:
    """Run all requests over an engine, at most `concurrency` at a time. If one raises (a bug or a cancellation) the
    rest is cancelled and cleaned up first."""
    def play(request: EpisodeRequest) -> Awaitable[Episode]:
        return run_episode(harness, request.problem, request.draw, episode_id=request.episode_id)

    return await run_requests(play, requests, concurrency=concurrency, progress=progress)


async def run_requests(play: Play, requests: Sequence[EpisodeRequest], *, concurrency: int,
                       progress: Callable[[int, int], None] | None = None) -> list[Episode]:
    """The same over anything that plays episodes."""
    gate = asyncio.Semaphore(concurrency)
    done = 0

    async def one(request: EpisodeRequest) -> Episode:
        nonlocal done
        async with gate:
            episode = await play(request)
        done += 1
        if progress is not None:
            progress(done, len(requests))
        return episode

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(request)) for request in requests]
    return [task.result() for task in tasks]
