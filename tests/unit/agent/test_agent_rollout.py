"""Many episodes: order and content do not depend on timing; one bad episode spoils no other."""

from __future__ import annotations

import asyncio
import hashlib
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidemill.agent.episode import Draw
from tidemill.agent.pool import SandboxPool
from tidemill.agent.rollout import EpisodeRequest, run_episodes
from tidemill.agent.task import Split
from tidemill.core.errors import EngineError
from tidemill.core.outcomes import Outcome


def sampler(stage: Any) -> Any:
    """A policy that errs now and then, as a pure function of seed, sequence and position."""
    right = stage.harness().engine.policy
    close = stage.codec.vocabulary.control.close

    def policy(text: str, request: Any) -> Any:
        key = f"{request.sampling.seed}/{request.sampling.sequence}/{len(text)}"
        dice = hashlib.sha256(key.encode()).digest()[0]
        if dice < 40 and text.endswith('type="string"<|sep|>'):
            return [*stage.codec.encode(["oak+"]), close]
        if dice < 20:
            return [*stage.codec.encode(["1"]), close]
        return right(text, request)

    return policy


def run(stage: Any, *, count: int = 24, pool_size: int = 3, concurrency: int = 8, delays: int = 0) -> list[Any]:
    async def main() -> list[Any]:
        rng = random.Random(delays)
        stage.delay = (lambda request_id: rng.random() * 0.002) if delays else None
        async with SandboxPool(stage.service, size=pool_size, lease="run", sessions=("python",)) as pool:
            harness = stage.harness(pool)
            requests = [
                EpisodeRequest(episode_id=f"e{i}", problem=stage.task.make(Split.TRAIN, i // 4, 5),
                               draw=Draw(seed=3, sequence=i, temperature=1.0)) for i in range(count)
            ]
            seen: list[tuple[int, int]] = []
            episodes = await run_episodes(harness, requests, concurrency=concurrency,
                                          progress=lambda done, total: seen.append((done, total)))
            assert seen == [(i + 1, count) for i in range(count)]
            assert harness.engine.most_running <= concurrency
            assert harness.engine.sessions == {}
            assert pool.stats.tool_calls == sum(not c.error for e in episodes for c in e.tool_calls)
        return episodes

    return asyncio.run(main())


def content(episodes: list[Any]) -> list[Any]:
    rows = [e.to_json() for e in episodes]
    for row in rows:
        del row["seconds"], row["generate_s"]
        for call in row["tool_calls"]:
            del call["ms"]
    return rows


def test_results_do_not_depend_on_timing(stage: Any) -> None:
    stage.policy = sampler(stage)
    plain = run(stage)
    assert {e.outcome for e in plain} == {Outcome.OK, Outcome.WRONG, Outcome.TRUNCATED}
    for concurrency, pool_size, delays in ((1, 1, 0), (24, 24, 1), (5, 2, 2)):
        again = run(stage, concurrency=concurrency, pool_size=pool_size, delays=delays)
        assert content(again) == content(plain)
    assert stage.service.alive == set()


def test_a_failing_engine_request_spoils_one_episode(stage: Any) -> None:
    right = stage.harness().engine.policy
    stage.policy = lambda text, request: (
        EngineError("this one") if request.sampling.sequence == 5 else right(text, request))
    episodes = run(stage)
    assert [i for i, e in enumerate(episodes) if e.outcome is Outcome.INFRA_ERROR] == [5]
    assert all(e.outcome is Outcome.OK for i, e in enumerate(episodes) if i != 5)


def test_dying_sandboxes_spoil_their_episode_only(stage: Any) -> None:
    right = stage.harness().engine.policy
    close = stage.codec.vocabulary.control.close

    def policy(text: str, request: Any) -> Any:
        if request.sampling.sequence % 7 == 3 and text.endswith('type="string"<|sep|>'):
            return [*stage.codec.encode(["die"]), close]
        return right(text, request)

    stage.policy = policy
    episodes = run(stage)
    assert [i for i, e in enumerate(episodes) if e.outcome is Outcome.INFRA_ERROR] == [3, 10, 17]
    assert sum(e.outcome is Outcome.OK for e in episodes) == 21
    assert stage.service.alive == set()


def test_bugs_are_raised_after_cleaning_up(stage: Any) -> None:
    stage.policy = lambda text, request: ZeroDivisionError("a bug in the harness")
    with pytest.raises(ExceptionGroup) as caught:
        run(stage)
    assert caught.group_contains(ZeroDivisionError)
    assert stage.service.alive == set()


@settings(max_examples=15)
@given(limit=st.integers(1, 60), length=st.integers(16, 192), noise=st.integers(0, 10**6))
def test_log_is_consistent_under_any_limits_and_any_policy(limit: int, length: int, noise: int) -> None:
    """Random tokens: the log never exceeds its limits and its lists stay parallel; outcomes stay typed."""
    stage = STAGE()
    stage.settings = replace(stage.settings, max_sampled_tokens=limit, max_model_len=length, max_turns=3)
    vocabulary = stage.codec.vocabulary
    control = vocabulary.control
    likely = [control.close, control.close, control.sep, *stage.codec.encode(["python", '"', "1", "oak", "+"])]

    def policy(text: str, request: Any) -> list[int]:
        rng = random.Random(f"{noise}/{request.sampling.sequence}/{len(text)}")
        return [rng.choice(likely) if rng.random() < 0.9 else rng.randrange(vocabulary.size) for _ in range(64)]

    stage.policy = policy
    for episode in run(stage, count=6):
        log = episode.log
        assert len(log.ids) == len(log.sampled) == len(log.logprobs) == len(log.versions)
        assert log.num_sampled <= limit
        assert max((i for i, s in enumerate(log.sampled) if s), default=0) < length
        assert episode.outcome in (Outcome.OK, Outcome.WRONG, Outcome.TRUNCATED)
        assert all((p == 0.0) == (not s) for p, s in zip(log.logprobs, log.sampled, strict=True))


STAGE: Any = None


@pytest.fixture(autouse=True)
def _stage_type(request: pytest.FixtureRequest) -> None:
    """Hypothesis needs a fresh stage per example."""
    global STAGE
    STAGE = request.getfixturevalue("make_stage")
