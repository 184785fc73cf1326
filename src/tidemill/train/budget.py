"""What a recipe will cost, worked out before anything is started: tokens, sandbox milliseconds, bytes, seconds at most.

Tokens are counted on demonstrations, which have the form of real episodes. Seconds use reference speeds measured on two
AVX2 cores with one thread; they are for choosing sizes, not a promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from tidemill.agent.task import Split
from tidemill.engine.config import PAGE_SIZE, format_bytes, plan_memory
from tidemill.engine.memory.limits import available_memory
from tidemill.engine.memory.pools import Pools
from tidemill.model.inventory import inventory, total_parameters
from tidemill.model.lora import LoraConfig, adapter_shapes
from tidemill.train.config import RunConfig
from tidemill.train.parts import Plan, engine_config

GENERATE_TOKENS_S = 10_000.0
"""Given and sampled tokens together, episodes in batches of about a hundred, toy model."""
UPDATE_TOKENS_S = 10_000.0
"""Forward and backward through a frozen base."""
WARMUP_TOKENS_S = 5_800.0
"""Forward and backward over all parameters, experts on the MXFP4 grid; each rank."""
TOOL_MS, RESET_MS = 4.0, 80.0
"""A call in a live session; reset in the guest with a fresh interpreter session and its set-up cell (gVisor)."""
USES_S = 14.0
"""Sandbox uses a second on two cores, however many sandboxes there are."""
SANDBOX_START_S = 0.25
"""Cold start from the template, several at a time."""
_SHOWN = 64
"""Demonstrations counted."""


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Figures of one recipe. `seconds_at_most` assumes every step uses all its dynamic-sampling rounds."""

    tokens_per_episode: float
    sampled_per_episode: float
    requests_per_episode: float
    """Engine requests: runs of sampled tokens."""
    calls_per_episode: float
    sandbox_ms_per_episode: float
    longest_episode: int
    episodes_per_step: tuple[int, int]
    """With one round, with all rounds."""
    tokens_per_step: tuple[int, int]
    update_tokens_per_step: int
    evaluation_tokens: int
    """Both looks at the test split and all at the dev split."""
    warmup_tokens_at_most: int
    vocabulary: int
    parameters: int
    base_bytes: int
    adapter_tensors: int
    adapter_bytes: int
    trainer_bytes: int
    """Decoded weights, adapter, its gradient and two moments; activations come on top."""
    engine_pools: str
    seconds_at_most: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    def lines(self) -> list[str]:
        """For people."""
        low, high = self.episodes_per_step
        few, many = self.tokens_per_step
        total = sum(self.seconds_at_most.values())
        parts = ", ".join(f"{k} {v:.0f} s" for k, v in self.seconds_at_most.items())
        return [
            f"episode   {self.tokens_per_episode:.0f} tokens, {self.sampled_per_episode:.1f} of them sampled in "
            f"{self.requests_per_episode:.0f} requests; {self.calls_per_episode:.0f} tool call, "
            f"{self.sandbox_ms_per_episode:.0f} ms of a sandbox; longest {self.longest_episode} tokens",
            f"step      {low} to {high} episodes = {few:,} to {many:,} tokens generated; at most "
            f"{self.update_tokens_per_step:,} in the update; {format_bytes(self.adapter_bytes)} synced",
            f"evaluate  {self.evaluation_tokens:,} tokens in all",
            f"warm-up   at most {self.warmup_tokens_at_most:,} tokens, meant to stop earlier",
            f"model     {self.parameters:,} parameters, vocabulary {self.vocabulary}, base "
            f"{format_bytes(self.base_bytes)} on disk; adapter {self.adapter_tensors} tensors",
            f"trainer   {format_bytes(self.trainer_bytes)} and activations",
            f"engine    {self.engine_pools}",
            f"time      at most {total:.0f} s ({parts}) on two cores",
        ]


def budget(config: RunConfig, plan: Plan) -> Budget:
    """Raises CapacityError if the engine's pools do not fit this machine."""
    text = plan.model.text_config
    logs = plan.demonstrations(Split.DEV, 0, min(_SHOWN, plan.task.size(Split.DEV)), seed=0)
    tokens, sampled = fmean(len(log) for log in logs), fmean(log.num_sampled for log in logs)
    requests = fmean(sum(b and not a for a, b in pairwise(log.sampled)) for log in logs)
    calls = float(bool(plan.task.tools))
    rl, looks = config.rl, 2 + config.rl.max_steps // config.eval.every
    episodes = rl.prompts * rl.samples, rl.prompts * rl.samples * max(1, rl.dynamic_rounds)
    evaluated = int(tokens * (2 * config.eval.test_n + looks * config.eval.dev_n))
    episodes_seen, drills_seen = plan.warmup_sources(config.seed)
    warmup = config.warmup.max_steps * sum(len(log) for source, n in (
        (episodes_seen, config.warmup.episodes), (drills_seen, config.warmup.drills)) if n for log in source(1, n))
    lora = LoraConfig(rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets)
    shapes = adapter_shapes(text, lora)
    adapter = 4 * sum(_numel(s) for s in shapes.values())
    engine = engine_config(config)
    memory = plan_memory(engine, slot_bytes=Pools.slot_bytes(text), page_bytes=Pools.page_bytes(text),
                         available=available_memory)
    generated = int(episodes[1] * tokens)
    uses = calls * (rl.max_steps * episodes[1] + 2 * config.eval.test_n + looks * config.eval.dev_n)
    seconds = {
        "sandboxes": config.sandbox.pool * SANDBOX_START_S * calls,
        "warm-up": warmup / WARMUP_TOKENS_S / config.warmup.ranks, "tools": uses / USES_S,
        "generate": rl.max_steps * generated / GENERATE_TOKENS_S,
        "update": rl.max_steps * rl.epochs * episodes[0] * tokens / UPDATE_TOKENS_S,
        "evaluate": evaluated / GENERATE_TOKENS_S,
    }
    return Budget(
        tokens_per_episode=tokens, sampled_per_episode=sampled, requests_per_episode=requests, calls_per_episode=calls,
        sandbox_ms_per_episode=calls * (TOOL_MS + RESET_MS), longest_episode=max(len(log) for log in logs),
        episodes_per_step=episodes, tokens_per_step=(int(episodes[0] * tokens), generated),
        update_tokens_per_step=int(episodes[0] * tokens), evaluation_tokens=evaluated, warmup_tokens_at_most=warmup,
        vocabulary=plan.tokenizer.size, parameters=total_parameters(text), base_bytes=_base_bytes(plan),
        adapter_tensors=len(shapes), adapter_bytes=adapter,
        trainer_bytes=total_parameters(text) * text.torch_dtype.itemsize + 4 * adapter,
        engine_pools=memory.describe() + f"; {PAGE_SIZE} tokens a page", seconds_at_most=seconds,
    )


def _base_bytes(plan: Plan) -> int:
    text = plan.model.text_config
    total = 0
    for spec in inventory(text).values():
        bits = 4.25 if spec.is_expert and text.quantize_experts else 8 * (2 if spec.dtype == "bfloat16" else 4)
        total += int(spec.numel * bits / 8)
    return total


def _numel(shape: tuple[int, ...]) -> int:
    n = 1
    for size in shape:
        n *= size
    return n
