"""What a run is made of: tokenizer, task, base, engine, sandboxes. Built here, handed to the loop, closed here."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, cast

from tidemill.agent.episode import Harness
from tidemill.agent.pool import SandboxPool
from tidemill.agent.scaffold import Scaffold
from tidemill.agent.task import Demonstrator, Split, Task, Teacher, load_task
from tidemill.agent.tool import ToolLimits, load_tool
from tidemill.core.config import parse_config, replace
from tidemill.core.engine_api import EngineClient
from tidemill.core.errors import ConfigError
from tidemill.core.sandbox_api import SandboxClient
from tidemill.core.token_log import TokenLog
from tidemill.engine.client import EmbeddedEngine
from tidemill.engine.config import EngineConfig
from tidemill.engine.core import EngineCore
from tidemill.engine.weights import EngineWeights
from tidemill.model.base import BaseStore
from tidemill.model.chat.codec import ChatCodec
from tidemill.model.chat.tokenizer import Tokenizer, build_tokenizer
from tidemill.model.config import ModelConfig, TextConfig
from tidemill.model.lora import LoraConfig
from tidemill.model.presets import BY_VOCABULARY
from tidemill.train.config import ModelSection, RunConfig
from tidemill.train.warmup import Source


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Everything the loop uses and does not own."""

    store: BaseStore
    lora: LoraConfig
    engine: EngineClient
    harness: Harness
    canary: tuple[tuple[int, ...], ...]
    pool: SandboxPool | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Tokenizer, task and scaffold of a recipe, before any model exists."""

    task: Task
    tokenizer: Tokenizer
    scaffold: Scaffold
    model: ModelConfig

    @classmethod
    def of(cls, config: RunConfig) -> Plan:
        """Raises ConfigError for unknown tasks, tools, presets, or sizes that do not fit each other."""
        task = load_task(config.task.name, config.task.options)
        tokenizer = build_tokenizer(task.words)
        tools = [load_tool(name) for name in task.tools]
        scaffold = Scaffold(ChatCodec(tokenizer), tools, declare=task.declare_tools)
        model = preset_config(config.model, tokenizer.size)
        if not isinstance(task, Demonstrator):
            raise ConfigError(f"task {task.name!r} offers no demonstrations, so this recipe has no warm-up",
                              field="task", remedy="Give it a demonstrate method (docs/tasks.md).")
        for name, wanted in (("dev", config.eval.dev_n), ("test", config.eval.test_n)):
            have = task.size(Split(name))
            if have < wanted:
                raise ConfigError(f"eval.{name}_n = {wanted}: the {name} split of {task.name!r} has {have} prompts",
                                  field=f"eval.{name}_n")
        return cls(task=task, tokenizer=tokenizer, scaffold=scaffold, model=model)

    def demonstrations(self, split: Split, first: int, count: int, seed: int) -> list[TokenLog]:
        """Expert episodes of consecutive prompts of a split."""
        assert isinstance(self.task, Demonstrator)
        problems = [self.task.make(split, i, seed) for i in range(first, first + count)]
        return [self.scaffold.demonstration(p, self.task.demonstrate(p)) for p in problems]

    def warmup_sources(self, seed: int) -> tuple[Source, Source]:
        """Episodes and drills of a warm-up step."""
        task = self.task
        assert isinstance(task, Task)
        assert isinstance(task, Demonstrator)
        size = task.size(Split.TRAIN)

        def episode(rng: random.Random) -> TokenLog:
            problem = task.make(Split.TRAIN, rng.randrange(size), rng.randrange(1 << 30))
            turns = task.teach(problem, rng) if isinstance(task, Teacher) else task.demonstrate(problem)
            return self.scaffold.demonstration(problem, turns)

        def episodes(step: int, count: int) -> Sequence[TokenLog]:
            rng = random.Random(f"{seed}/warmup/{step}")
            return [episode(rng) for _ in range(count)]

        def drills(step: int, count: int) -> Sequence[TokenLog]:
            return [self.scaffold.drill(d) for d in task.drills(random.Random(f"{seed}/drills/{step}"), count)]

        return episodes, drills

    def canary(self, config: RunConfig) -> tuple[tuple[int, ...], ...]:
        """Fixed sequences: demonstrations with tool tokens, one as long as the context, and ids drawn from the whole
        vocabulary, which reach rare experts."""
        rng = random.Random("canary")
        limit = config.agent.max_model_len
        count = config.canary.sequences
        logs = self.demonstrations(Split.DEV, 0, max(1, count - 2), seed=7)
        everything = [i for log in logs for i in log.ids]
        long = tuple((everything * (limit // len(everything) + 1))[:limit])
        rare = tuple(rng.randrange(self.tokenizer.size) for _ in range(min(96, limit)))
        return (*(tuple(log.ids[:limit]) for log in logs), long, rare)[:count]


def preset_config(section: ModelSection, vocab_size: int) -> ModelConfig:
    """A preset with the section's overrides. Raises ConfigError naming preset or field."""
    if section.preset not in BY_VOCABULARY:
        raise ConfigError(f"model.preset = {section.preset!r}: expected one of {', '.join(BY_VOCABULARY)}",
                          field="model.preset")
    model = BY_VOCABULARY[section.preset](vocab_size)
    if not section.overrides:
        return model
    changed = _merged(asdict(model.text_config), section.overrides)
    return replace(model, text_config=parse_config(TextConfig, changed, source="model.overrides"))


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with `changes`, nested mappings key by key."""
    out = dict(values)
    for key, change in changes.items():
        nested = isinstance(change, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = _merged(out[key], cast("Mapping[str, Any]", change)) if nested else change
    return out


def engine_config(config: RunConfig) -> EngineConfig:
    """Sizes of the embedded engine: every concurrent episode keeps its state."""
    n = config.agent.concurrency
    return EngineConfig(max_model_len=config.agent.max_model_len, max_running=n, num_slots=n,
                        max_batched_tokens=max(4096, n), prefill_chunk=config.agent.max_model_len)


@asynccontextmanager
async def assemble(config: RunConfig, plan: Plan, store: BaseStore, *, lease: str, client: SandboxClient | None,
                   wrap: Callable[[EngineClient], EngineClient]) -> AsyncIterator[Parts]:
    """Engine and sandbox pool, up for the length of the block. `client` None: the task needs no sandbox. `wrap` puts a
    control's fault in front of the engine."""
    async with AsyncExitStack() as stack:
        engine = EmbeddedEngine(lambda: EngineCore(EngineWeights(store, name=config.name), engine_config(config)))
        stack.push_async_callback(engine.close)
        pool = None
        tools = list(plan.scaffold.tools.values())
        if client is not None and tools:
            limits = ToolLimits(timeout_s=config.agent.tool_timeout_s, output_bytes=config.agent.tool_output_bytes)
            kinds = tuple(dict.fromkeys(t.session for t in tools if t.session))
            pool = await stack.enter_async_context(SandboxPool(
                client, size=config.sandbox.pool, lease=lease, template=config.sandbox.template,
                backend=config.sandbox.backend, sessions=kinds, limits=limits))
        wrapped = wrap(engine)
        harness = Harness(engine=wrapped, task=plan.task, tools=tools, scaffold=plan.scaffold, settings=config.agent,
                          pool=pool)
        lora = LoraConfig(rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets)
        yield Parts(store=store, lora=lora, engine=wrapped, harness=harness, canary=plan.canary(config), pool=pool)
