"""The harness over the real engine: the log holds what the engine sampled, bit for bit, whatever ran beside it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill.agent.episode import Draw, Episode
from tidemill.agent.pool import SandboxPool
from tidemill.agent.rollout import EpisodeRequest, run_episodes
from tidemill.agent.task import Split
from tidemill.core.engine_api import Completion, GenerateRequest
from tidemill.core.outcomes import Outcome
from tidemill.engine.client import EmbeddedEngine
from tidemill.engine.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.weights import EngineWeights
from tidemill.model import presets
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM


class Nudged:
    """The engine, with the tokens that calls are made of likely, and the raw log-probs of every session kept."""

    def __init__(self, engine: EmbeddedEngine, likely: list[int]) -> None:
        self.engine, self.raw = engine, dict[str, list[float]]()
        self.bias = tuple((token, 9.0 if i < 2 else 8.0) for i, token in enumerate(likely))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, request: GenerateRequest) -> Completion:
        done = await self.engine.generate(
            replace(request, sampling=replace(request.sampling, logit_bias=self.bias)))
        self.raw.setdefault(request.session_id or "", []).extend(done.model_logprobs)
        return done


@pytest.fixture
def base(tmp_path: Path, stage: Any) -> Path:
    torch.set_num_threads(1)
    write_base(tmp_path / "base", CausalLM(presets.toy(stage.codec.vocabulary.size), seed=1))
    return tmp_path / "base"


def test_logs_are_the_engines_and_do_not_depend_on_company(stage: Any, base: Path) -> None:
    likely = [stage.codec.vocabulary.control.close, *stage.codec.encode(['"', "python", "oak"])]

    async def play(concurrency: int) -> tuple[list[Episode], list[tuple[float, ...]], Nudged]:
        sizes = EngineConfig(max_model_len=192, max_running=concurrency, pool_bytes=1 << 26)
        async with (
            EmbeddedEngine(lambda: EngineCore(EngineWeights(BaseStore.open(base), name="toy"), sizes)) as real,
            SandboxPool(stage.service, size=3, lease="run", sessions=("python",)) as pool,
        ):
            engine = Nudged(real, likely)
            harness = stage.harness(pool, engine=engine)
            requests = [
                EpisodeRequest(episode_id=f"e{i}", problem=stage.task.make(Split.TRAIN, i, 1),
                               draw=Draw(seed=9, sequence=i, temperature=1.0)) for i in range(8)
            ]
            episodes = await run_episodes(harness, requests, concurrency=concurrency)
            assert (await real.info()).stats["sessions"] == 0
            return episodes, [await real.score(e.log.ids) for e in episodes], engine

    together, scores, engine = asyncio.run(play(8))
    assert {e.outcome for e in together} <= {Outcome.WRONG, Outcome.TRUNCATED}
    assert sum(len(e.tool_calls) for e in together) >= 3, "the tool path was taken"
    for episode, scored in zip(together, scores, strict=True):
        where = [t for t, sampled in enumerate(episode.log.sampled) if sampled]
        assert [scored[t - 1] for t in where] == engine.raw[f"e{together.index(episode)}"]
    alone, _, _ = asyncio.run(play(1))
    assert [e.log for e in alone] == [e.log for e in together]
