"""The run: warm-up, then generate, train, sync, look, again. Reads from top to bottom as it happens.

One process, one engine in a thread, one trainer, in turn (tidemill.train.states). What the run needs from outside -
engine, sandboxes, task - is built by tidemill.train.parts and handed in.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from tidemill.core.errors import CanaryError, TidemillError, TrainError
from tidemill.core.files import write_json
from tidemill.train import checkpoint
from tidemill.train.canary import Canary, Curves
from tidemill.train.checkpoint import Checkpoint
from tidemill.train.config import RunConfig
from tidemill.train.controls import random_reward
from tidemill.train.metrics import Metrics
from tidemill.train.parts import Parts
from tidemill.train.rollouts import Evaluation, Rollouts, StepBatch
from tidemill.train.run_dir import RunDir, check_exactly_once
from tidemill.train.states import State, StateMachine
from tidemill.train.sync import AdapterSync, SyncRefusedError
from tidemill.train.trainer import StepOutcome, StepReport, Trainer


class _StopAskedError(Exception):
    """Ctrl-C came where there is nothing to finish first."""


@dataclass
class Progress:
    """What outlives a kill besides checkpoints: results that must not be computed twice, and sums over attempts."""

    test_before: dict[str, Any] | None = None
    test_after: dict[str, Any] | None = None
    wall_s: float = 0.0
    setup_s: float = 0.0
    tool_calls: int = 0
    infra_errors: int = 0
    sandboxes_used: int = 0
    syncs: int = 0
    syncs_verified: int = 0


@dataclass
class Position:
    """Where the loop stands; everything here is in checkpoints."""

    step: int = 0
    cursor: int = 0
    """Next prompt of the training stream."""
    dev: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    kl_floor: float | None = None
    kl_last: float = 0.0


class Loop:
    """One attempt at a run. `run()` returns why it stopped; raises TidemillError if it cannot go on."""

    def __init__(self, config: RunConfig, run: RunDir, parts: Parts, metrics: Metrics, progress: Progress, *,
                 stop: asyncio.Event, saved: Checkpoint | None = None, control: str = "",
                 max_steps: int | None = None) -> None:
        """`stop`: set from outside to end the run after its current step."""
        self.config, self.run_dir, self.parts, self.metrics = config, run, parts, metrics
        self.progress, self.saved, self.control = progress, saved, control
        self.max_steps = config.rl.max_steps if max_steps is None else max_steps
        self.engine = parts.engine
        self.position = Position()
        self.machine = StateMachine(lambda old, new: metrics.event("state", old=old.value, new=new.value))
        self.trainer = Trainer(parts.store, parts.lora, config.rl, seed=config.seed,
                               max_sampled=config.agent.max_sampled_tokens)
        self.sync = AdapterSync(self.engine, parts.lora, base_digest=parts.store.digest, folder=run.adapters,
                                chunk_bytes=config.sync_chunk_bytes)
        self.canary = Canary(config.canary)
        self.rollouts = Rollouts(config, parts, reward=random_reward if control == "random-reward" else None)
        self.stop_requested = stop

    async def run(self) -> str:
        """To the end: `dev`, `steps`, `canary`, `sync-refused`, or `interrupted`."""
        if self.saved is not None:
            self._restore(self.saved)
        try:
            await self._sync(must_change=False)
            await self._look()
            if self.saved is None:
                await self._start()
            stopped_by = await self._steps()
            if stopped_by in ("dev", "steps") and not self.control:
                await self._finish()
        except _StopAskedError:
            stopped_by = "interrupted"
        except CanaryError:
            stopped_by = "canary"
        except SyncRefusedError:
            stopped_by = "sync-refused"
        except TidemillError:
            self.machine.to(State.FAILED)
            raise
        if stopped_by in ("canary", "sync-refused"):
            self.machine.to(State.FAILED)
        elif self.machine.state is not State.STOPPED:
            self.machine.to(State.STOPPED)
        self.metrics.event("stop", stopped_by=stopped_by, step=self.position.step)
        return stopped_by

    async def _start(self) -> None:
        """Before the first step: where do we stand, and may RL start there?"""
        if not self.control and self.progress.test_before is None:
            self.progress.test_before = (await self._evaluate("test", self.config.eval.test_n)).to_json()
            self._save_progress()
        dev = await self._evaluate("dev", self.config.eval.dev_n)
        low, high = self.config.warmup.band
        if not low <= dev.accuracy <= high:
            raise TrainError(
                f"greedy dev accuracy before RL is {dev.accuracy:.1%}, outside this recipe's band of {low:.0%} to "
                f"{high:.0%}: there would be " + ("nothing to learn from" if dev.accuracy < low else "nothing to show"),
                remedy="Change warmup.stop_at or warmup.max_steps.",
            )

    async def _steps(self) -> str:
        """Steps until dev accuracy or the step limit ends them. A dev evaluation that is due comes first, so that a
        resumed run looks exactly where an uninterrupted one does."""
        settings = self.config.eval
        while True:
            step = self.position.step
            due = step % settings.every == 0 or step == self.max_steps
            if due and not any(e["step"] == step for e in self.position.dev):
                await self._evaluate("dev", settings.dev_n)
            recent = self.position.dev[-settings.patience :]
            if len(recent) == settings.patience and all(e["accuracy"] >= settings.stop_at for e in recent):
                return "dev"
            if step >= self.max_steps:
                return "steps"
            if self.stop_requested.is_set():
                return "interrupted"
            await self._step()

    async def _step(self) -> None:
        """One turn of the wheel: generate, train, checkpoint, sync, look."""
        config = self.config
        seconds: dict[str, float] = {}
        self.machine.to(State.GENERATE)
        with _timed(seconds, "generate"):
            batch = await self.rollouts.collect(step=self.position.step + 1, cursor=self.position.cursor,
                                                progress=self.metrics.progress)
        self.machine.to(State.ENGINE_SLEEP)
        with _timed(seconds, "sleep"):
            if config.sleep_engine:
                await self.engine.sleep(("pools",))
        self.machine.to(State.TRAIN_WAKE)
        self.machine.to(State.TRAIN)
        with _timed(seconds, "train"):
            report = await asyncio.to_thread(self.trainer.step, batch.samples)
        self.position.step += 1
        self.position.cursor = batch.prompts[1]
        if report.tokens:
            self.position.kl_last = report.kl_k3
            self.position.kl_floor = report.kl_k3 if self.position.kl_floor is None else self.position.kl_floor
        self.progress.tool_calls += batch.tool_calls
        self.progress.infra_errors += batch.outcomes.get("infra_error", 0)
        # The row is written before the checkpoint: a checkpoint of step s implies the record of step s.
        self._record(batch, report, seconds)
        if self.position.step % config.checkpoint_every == 0:
            self.machine.to(State.CHECKPOINT)
            self._checkpoint()
        self.machine.to(State.TRAIN_SLEEP)
        self.trainer.sleep()
        await self._sync(must_change=report.outcome is StepOutcome.NORMAL)
        await self._look()

    async def _sync(self, *, must_change: bool) -> None:
        """Adapter v + 1 to the engine, proven, while its pools are away."""
        self.machine.to(State.SYNC)
        self.progress.syncs += 1
        report = await self.sync.push(self.trainer.adapter(), step=self.position.step, must_change=must_change)
        self.progress.syncs_verified += 1
        self.metrics.event("sync", **asdict(report))
        self.machine.to(State.POOL_WAKE)
        if (await self.engine.info()).asleep:
            await self.engine.wake(("pools",))

    async def _look(self) -> None:
        """Canary: do engine and trainer agree on fixed tokens? Raises CanaryError after too many disagreements."""
        trainer: Curves = [x.tolist() for x in self.trainer.score(self.parts.canary)]
        if self.sync.version == 1:
            runs = [await self._score() for _ in range(3)]
            self.canary.measure_floor(trainer, runs)
            self.metrics.event("floor", floor=self.canary.floor, repeatability=self.canary.repeatability,
                               threshold=self.canary.threshold)
        reading = self.canary.read(self.sync.version, trainer, await self._score())
        self.metrics.canary({"step": self.position.step, **reading.to_json()})
        if self.canary.stops:
            raise CanaryError(f"canary fired {self.canary.fired} times in a row ({reading.fires}): the engine does not "
                              f"follow the trainer (missed {reading.missed:.3g} of {reading.trainer_moved:.3g} nats)")

    async def _score(self) -> Curves:
        return [list(x) for x in await asyncio.gather(*(self.engine.score(ids) for ids in self.parts.canary))]

    async def _evaluate(self, split: str, n: int) -> Evaluation:
        """Greedy accuracy on a split. An evaluation does not outlast a request to stop: a resumed run makes it anew."""
        if self.machine.state is State.POOL_WAKE:
            self.machine.to(State.EVAL)
        work = asyncio.ensure_future(self.rollouts.evaluate(split, n, progress=self.metrics.progress))
        asked = asyncio.ensure_future(self.stop_requested.wait())
        try:
            await asyncio.wait({work, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise _StopAskedError
        finally:
            asked.cancel()
            work.cancel()
            await asyncio.wait({work, asked})
        result = work.result()
        self.metrics.event("eval", step=self.position.step, split=split, **result.to_json())
        self.run_dir.write_episodes(f"{split}-{self.position.step:05d}", result.rows)
        if split == "dev":
            self.position.dev.append({"step": self.position.step, "accuracy": result.accuracy})
        self.progress.tool_calls += result.tool_calls
        self.progress.infra_errors += result.outcomes.get("infra_error", 0)
        return result

    async def _finish(self) -> None:
        """The second and last look at the test split."""
        self.progress.test_after = (await self._evaluate("test", self.config.eval.test_n)).to_json()
        self._save_progress()

    def _record(self, batch: StepBatch, report: StepReport, seconds: dict[str, float]) -> None:
        self.run_dir.write_episodes(f"step-{self.position.step:05d}", batch.rows)
        figures = asdict(report)
        figures["outcome"] = report.outcome.value
        figures.pop("seconds")
        figures.pop("tokens")
        self.metrics.event("step", step=self.position.step, version=self.sync.version, **batch.to_json(), **figures,
                           seconds={k: round(v, 4) for k, v in seconds.items()})

    def _checkpoint(self) -> None:
        plain = {"position": asdict(self.position), "canary": self.canary.state(), "version": self.sync.version}
        path = checkpoint.save(self.run_dir.checkpoints, Checkpoint(self.position.step, self.trainer.state(), plain))
        self._save_progress()
        self.metrics.event("checkpoint", step=self.position.step,
                           nbytes=sum(f.stat().st_size for f in path.iterdir()))

    def _restore(self, saved: Checkpoint) -> None:
        """Trainer, position and canary as they were; the chain of manifests goes on from the version served then."""
        self.trainer.load_state(saved.tensors)
        self.position = Position(**saved.plain["position"])
        self.canary.load_state(saved.plain["canary"])
        self.sync.resume_from(int(saved.plain["version"]))

    def _save_progress(self) -> None:
        write_json(self.run_dir.path / "progress.json", asdict(self.progress))

    def ledger(self) -> int:
        """Prompts in the lineage of the final weights, each exactly once."""
        return check_exactly_once(self.run_dir)


@contextmanager
def _timed(into: dict[str, float], name: str) -> Iterator[None]:
    """Adds the seconds of a block to a dict."""
    started = time.monotonic()
    try:
        yield
    finally:
        into[name] = into.get(name, 0.0) + time.monotonic() - started
