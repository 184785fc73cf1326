"""Episodes for the trainer: groups of samples with dynamic sampling, and greedy evaluation.

Prompts of the training stream are numbered 0, 1, 2, ...; number n is prompt n of a shuffled pass through the train
split, and everything random in its episodes follows from (run seed, n, sample). Each number is used at most once in a
run.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tidemill.agent.episode import Draw, Episode
from tidemill.agent.rollout import EpisodeRequest, run_episodes
from tidemill.agent.stats import wilson
from tidemill.agent.task import Problem, Split
from tidemill.core.outcomes import Outcome
from tidemill.train.algorithms import GroupFilter, group_advantages, keep_group, soft_overlong_penalty
from tidemill.train.config import RunConfig
from tidemill.train.parts import Parts
from tidemill.train.samples import Sample

EVAL_SEED = 20_260_727
"""Seed of dev and test problems: the same ones for every run, so that runs can be compared item by item."""

Progress = Callable[[str, int, int], None]


@dataclass(kw_only=True)
class StepBatch:
    """What one step trains on."""

    prompts: tuple[int, int]
    """First and last-plus-one number of the training stream used, dropped groups included."""
    rounds: int
    samples: list[Sample]
    groups: int
    """Groups kept."""
    drops: dict[str, int]
    """Groups dropped, by reason."""
    episodes: int
    outcomes: dict[str, int]
    reward: float
    """Mean over all episodes with a reward."""
    accuracy: float
    """Share of all episodes with a reward that were graded correct."""
    sampled_tokens: int
    total_tokens: int
    tool_calls: int
    tool_ms: float
    rows: list[dict[str, Any]] = field(repr=False)

    def to_json(self) -> dict[str, Any]:
        """Figures for the step's event."""
        return {
            "prompts": list(self.prompts), "rounds": self.rounds, "groups": self.groups, "drops": self.drops,
            "episodes": self.episodes, "outcomes": self.outcomes, "reward": self.reward, "accuracy": self.accuracy,
            "sampled_tokens": self.sampled_tokens, "total_tokens": self.total_tokens, "tool_calls": self.tool_calls,
            "tool_ms": self.tool_ms,
        }


@dataclass(kw_only=True)
class Evaluation:
    """Greedy accuracy over a split. Episodes lost to infrastructure are not in n."""

    n: int
    correct: int
    outcomes: dict[str, int]
    tool_calls: int
    seconds: float
    rows: list[dict[str, Any]] = field(repr=False)

    @property
    def accuracy(self) -> float:
        return self.correct / max(1, self.n)

    def to_json(self) -> dict[str, Any]:
        low, high = wilson(self.correct, self.n)
        return {"n": self.n, "correct": self.correct, "accuracy": self.accuracy, "lo95": low, "hi95": high,
                "outcomes": self.outcomes, "seconds": round(self.seconds, 3)}


class Rollouts:
    """`reward` replaces the grader's reward by a function of the sampled ids (control `random-reward`)."""

    def __init__(self, config: RunConfig, parts: Parts, *,
                 reward: Callable[[Sequence[int]], float] | None = None) -> None:
        self._config, self._parts, self._reward = config, parts, reward
        self._orders: dict[int, list[int]] = {}

    def problem(self, number: int) -> Problem:
        """Prompt `number` of the training stream."""
        task = self._parts.harness.task
        size = task.size(Split.TRAIN)
        lap, place = divmod(number, size)
        if lap not in self._orders:
            order = list(range(size))
            random.Random(f"{self._config.seed}/lap/{lap}").shuffle(order)
            self._orders = {lap: order}
        return task.make(Split.TRAIN, self._orders[lap][place], self._config.seed * 1_000_003 + number)

    async def collect(self, *, step: int, cursor: int, progress: Progress) -> StepBatch:
        """Episodes for one step: rounds of new prompts until enough groups have differing rewards."""
        rl = self._config.rl
        first, rounds = cursor, 0
        drops: Counter[str] = Counter()
        kept: list[tuple[list[Episode], list[float]]] = []
        every: list[Episode] = []
        while len(kept) < rl.prompts and rounds < max(1, rl.dynamic_rounds):
            rounds += 1
            want = rl.prompts - len(kept)
            groups = await self._groups(step, range(cursor, cursor + want), progress)
            cursor += want
            for group in groups:
                every += group
                alive = [e for e in group if e.outcome.trains]
                rewards = [self._reward_of(e) for e in alive]
                why = keep_group(rewards)
                if why is GroupFilter.KEPT or rl.dynamic_rounds == 0:
                    kept.append((alive, rewards))
                else:
                    drops[why.value] += 1
        samples = [
            Sample.from_log(episode.log, float(advantage))
            for episodes, rewards in kept if episodes
            for episode, advantage in zip(episodes, group_advantages(rl.advantage, torch.tensor(rewards)), strict=True)
        ]
        return self._batch((first, cursor), rounds, samples, len(kept), drops, every)

    async def _groups(self, step: int, numbers: Sequence[int], progress: Progress) -> list[list[Episode]]:
        rl, seed = self._config.rl, self._config.seed
        requests = [
            EpisodeRequest(
                episode_id=f"s{step}-p{number}-{k}", problem=problem,
                draw=Draw(seed=seed, sequence=number * rl.samples + k, temperature=rl.temperature),
            )
            for number in numbers for problem in [self.problem(number)] for k in range(rl.samples)
        ]
        episodes = await run_episodes(self._parts.harness, requests, concurrency=self._config.agent.concurrency,
                                      progress=lambda done, total: progress("episodes", done, total))
        return [episodes[i : i + rl.samples] for i in range(0, len(episodes), rl.samples)]

    def _reward_of(self, episode: Episode) -> float:
        """The reward that trains: the grader's (or the control's) plus the overlong penalty."""
        assert episode.reward is not None
        agent, rl = self._config.agent, self._config.rl
        penalty = soft_overlong_penalty(episode.log.num_sampled, max_length=agent.max_sampled_tokens,
                                        buffer=rl.overlong_buffer)
        if self._reward is None:
            return episode.reward + penalty
        log = episode.log
        return self._reward([t for t, sampled in zip(log.ids, log.sampled, strict=True) if sampled]) + penalty

    def _batch(self, prompts: tuple[int, int], rounds: int, samples: list[Sample], groups: int,
               drops: Mapping[str, int], every: Sequence[Episode]) -> StepBatch:
        graded = [e for e in every if e.reward is not None]
        calls = [c for e in every for c in e.tool_calls]
        return StepBatch(
            prompts=prompts, rounds=rounds, samples=samples, groups=groups, drops=dict(drops), episodes=len(every),
            outcomes=_outcomes(every), reward=_mean([e.reward or 0.0 for e in graded]),
            accuracy=_mean([float(e.verdict is not None and e.verdict.correct) for e in graded]),
            sampled_tokens=sum(e.log.num_sampled for e in every), total_tokens=sum(len(e.log) for e in every),
            tool_calls=len(calls), tool_ms=_mean([c.duration_s * 1e3 for c in calls]),
            rows=[e.to_json() for e in every],
        )

    async def evaluate(self, split: str, n: int, *, progress: Progress) -> Evaluation:
        """Greedy episodes on the first n problems of a split."""
        started = time.monotonic()
        task = self._parts.harness.task
        requests = [
            EpisodeRequest(episode_id=f"{split}-{i}", problem=task.make(Split(split), i, EVAL_SEED),
                           draw=Draw(seed=EVAL_SEED, sequence=i, temperature=0.0))
            for i in range(n)
        ]
        episodes = await run_episodes(self._parts.harness, requests, concurrency=self._config.agent.concurrency,
                                      progress=lambda done, total: progress(f"{split} evaluation", done, total))
        alive = [e for e in episodes if e.outcome is not Outcome.INFRA_ERROR]
        return Evaluation(
            n=len(alive), correct=sum(e.verdict is not None and e.verdict.correct for e in alive),
            outcomes=_outcomes(episodes), tool_calls=sum(len(e.tool_calls) for e in episodes),
            seconds=time.monotonic() - started, rows=[e.to_json() for e in episodes],
        )


def _outcomes(episodes: Sequence[Episode]) -> dict[str, int]:
    return dict(Counter(e.outcome.value for e in episodes))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
