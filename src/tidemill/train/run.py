"""One run of a recipe from its folder to its summary: set up, warm up, loop, look at the test split, report.

A resumed run first removes what its killed predecessor left (its processes, the sandboxes of its lease, and of no other
run), says so, and goes on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill import __version__
from tidemill.agent.task import Split
from tidemill.core.config import load_yaml, parse_config, read_environment
from tidemill.core.engine_api import EngineClient
from tidemill.core.errors import ConfigError, InputError
from tidemill.core.files import write_json
from tidemill.core.launcher import end_leftovers
from tidemill.core.sandbox_api import SandboxClient
from tidemill.model.base import MANIFEST, BaseStore, write_base
from tidemill.sandbox.client import LocalSandboxClient
from tidemill.sandbox.starting import ensure_daemon
from tidemill.train.checkpoint import load_newest
from tidemill.train.config import RunConfig
from tidemill.train.controls import ControlOutcome, Verdict, control_settings, judge, plant
from tidemill.train.loop import Loop, Progress
from tidemill.train.metrics import Listener, Metrics
from tidemill.train.parts import Plan, assemble
from tidemill.train.report import write_report
from tidemill.train.rollouts import EVAL_SEED
from tidemill.train.run_dir import RunDir
from tidemill.train.warmup import WarmupStopped
from tidemill.train.warmup_ranks import warmed_up

Sandboxes = Callable[[], AbstractAsyncContextManager[SandboxClient]]
"""Opens a client of the sandbox service for the length of a block."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    path: Path
    stopped_by: str
    summary: dict[str, Any]
    control: Verdict | None = None


@asynccontextmanager
async def local_sandboxes() -> AsyncIterator[SandboxClient]:
    """The node daemon of this machine, started if need be; it stays when we leave."""
    environment = read_environment()
    if environment.e2b_api_url:
        raise ConfigError("E2B_API_URL is set: training through a remote sandbox service is not available yet",
                          field="E2B_API_URL", remedy="Unset it to use this machine's sandboxes.")
    await ensure_daemon(environment.state_dir, cache_dir=environment.cache_dir)
    client = LocalSandboxClient(environment.state_dir)
    try:
        yield client
    finally:
        await client.close()


def start(config: RunConfig, runs: Path) -> RunDir:
    """A new run folder. Raises ConfigError before anything is written if the recipe cannot work."""
    Plan.of(config)
    return RunDir.create(runs, config)


def reopen(path: Path) -> tuple[RunDir, RunConfig]:
    """The folder and configuration of an earlier attempt."""
    run = RunDir.open(path)
    return run, parse_config(RunConfig, load_yaml(path / "config.resolved.yaml"), source=str(path))


async def execute(config: RunConfig, run: RunDir, *, listeners: Sequence[Listener] = (), control: str = "",
                  sandboxes: Sandboxes = local_sandboxes) -> Result:
    """Run (or go on with) `run` to its end. Ctrl-C ends it after the current step of warm-up or RL, or in the middle of
    an evaluation; a second one at once. Nothing is left running either way. Raises TidemillError if it cannot go on,
    CancelledError if it was interrupted before RL began."""
    started = time.monotonic()
    torch.set_num_threads(config.threads)
    plan = Plan.of(config)
    settings = control_settings(config, control) if control else None
    max_steps = settings.steps if settings else config.rl.max_steps
    progress = _load_progress(run)
    stop = asyncio.Event()
    with Metrics(run, listeners=listeners) as metrics, _interruptible(stop):
        saved = load_newest(run.checkpoints)
        if run.attempt:
            await _resume(run, metrics, plan, sandboxes, from_step=saved.step if saved else 0)
        metrics.event("start", recipe=config.name, seed=config.seed, max_steps=max_steps, version=__version__,
                      control=control)
        _describe_data(run, plan, config)
        if not (run.base / MANIFEST).is_file():
            await _try_sandbox(config, run, plan, sandboxes)
        try:
            store = await asyncio.to_thread(_base, config, run, plan, metrics, stop.is_set)
        except WarmupStopped:
            metrics.event("stop", stopped_by="interrupted", step=0)
            raise asyncio.CancelledError from None
        began_setup = time.monotonic()

        def wrap(engine: EngineClient) -> EngineClient:
            return plant(control, engine) if control else engine

        async with _client(plan, sandboxes) as client:
            async with assemble(config, plan, store, lease=run.name, client=client, wrap=wrap) as parts:
                progress.setup_s += time.monotonic() - began_setup
                metrics.event("setup", what=f"engine and {config.sandbox.pool if parts.pool else 0} sandboxes ready",
                              seconds=round(time.monotonic() - began_setup, 3))
                loop = Loop(config, run, parts, metrics, progress, saved=saved, control=control, max_steps=max_steps,
                            stop=stop)
                stopped_by = await loop.run()
                progress.sandboxes_used += parts.pool.stats.sandboxes_used if parts.pool else 0
                served = (await parts.engine.info()).version
            left = len(await client.list(lease=run.name)) if client else 0
        progress.wall_s += time.monotonic() - started
        write_json(run.path / "progress.json", asdict(progress))
        verdict = None
        if settings is not None:
            verdict = _judge(run, control, settings, loop, stopped_by, served, metrics)
        summary = _summary(config, loop, progress, stopped_by, left)
        if stopped_by != "interrupted":
            loop.ledger()
            run.write_summary(summary)
    write_report(run, plan.tokenizer.decode)
    return Result(path=run.path, stopped_by=stopped_by, summary=summary, control=verdict)


def _base(config: RunConfig, run: RunDir, plan: Plan, metrics: Metrics, stop: Callable[[], bool]) -> BaseStore:
    """The packed, frozen base of this run: warmed up now, unless an earlier attempt finished it. Raises WarmupStopped.
    Runs in a thread of its own, so that signals are heard meanwhile."""
    if (run.base / MANIFEST).is_file():
        return BaseStore.open(run.base)
    started = time.monotonic()

    def tell(step: int, loss: float, accuracy: float) -> None:
        metrics.event("warmup", step=step, loss=round(loss, 6), accuracy=accuracy)
        metrics.progress("warm-up", step, config.warmup.max_steps)

    model, report = warmed_up(config, plan, run, progress=tell, stop=stop)
    metrics.event("warmup_end", seconds=round(time.monotonic() - started, 3), **asdict(report))
    plan.tokenizer.save(run.base)
    manifest = write_base(run.base, model)
    shutil.rmtree(run.warmup, ignore_errors=True)
    metrics.event("setup", what=f"base packed, {manifest.base_digest[:19]}",
                  seconds=round(time.monotonic() - started, 3))
    return BaseStore.open(run.base)


async def _resume(run: RunDir, metrics: Metrics, plan: Plan, sandboxes: Sandboxes, *, from_step: int) -> None:
    """Remove what the attempt before left, and note from where this one goes on."""
    removed = end_leftovers(run.ledger)
    async with _client(plan, sandboxes) as client:
        count = await client.release_lease(run.name) if client else 0
    if count:
        removed.append(f"{count} sandboxes")
    metrics.event("resume", from_step=from_step, removed=removed)


async def _try_sandbox(config: RunConfig, run: RunDir, plan: Plan, sandboxes: Sandboxes) -> None:
    """Make one sandbox and end it: what would be missing after the warm-up (root, runtime, template) is missed now."""
    async with _client(plan, sandboxes) as client:
        if client is not None:
            sandbox = await client.create(template=config.sandbox.template, backend=config.sandbox.backend,
                                          lease=run.name)
            await sandbox.kill()


@asynccontextmanager
async def _client(plan: Plan, sandboxes: Sandboxes) -> AsyncIterator[SandboxClient | None]:
    if not (plan.task.tools and plan.task.needs_sandbox):
        yield None
        return
    async with sandboxes() as client:
        yield client


def _load_progress(run: RunDir) -> Progress:
    path = run.path / "progress.json"
    return Progress(**json.loads(path.read_text())) if path.is_file() else Progress()


def _describe_data(run: RunDir, plan: Plan, config: RunConfig) -> None:
    write_json(run.path / "data.json", {
        "task": config.task.name, "options": config.task.options, "tokenizer": plan.tokenizer.digest,
        "vocabulary": plan.tokenizer.size, "splits": {s.value: plan.task.size(s) for s in Split},
        "eval_seed": EVAL_SEED,
    })


def _judge(run: RunDir, control: str, settings: Any, loop: Loop, stopped_by: str, served: int,
           metrics: Metrics) -> Verdict:
    dev = loop.position.dev
    outcome = ControlOutcome(stopped_by=stopped_by, steps=loop.position.step,
                             accuracy_before=dev[0]["accuracy"] if dev else 0.0,
                             accuracy_after=dev[-1]["accuracy"] if dev else 0.0, served_version=served)
    verdict = judge(control, settings, outcome)
    write_json(run.path / "controls" / f"{control}.json", verdict.to_json())
    metrics.event("control", name=control, expect=verdict.expect, verdict=verdict.to_json())
    return verdict


def _summary(config: RunConfig, loop: Loop, progress: Progress, stopped_by: str, left: int) -> dict[str, Any]:
    before, after = progress.test_before or {}, progress.test_after or {}

    def interval(row: dict[str, Any]) -> list[float] | None:
        return [row["lo95"], row["hi95"]] if row else None

    manifest = loop.sync.manifest
    return {
        "recipe": config.name, "seed": config.seed, "test_n": before.get("n", config.eval.test_n),
        "test_before": before.get("accuracy"), "test_after": after.get("accuracy"), "ci95_before": interval(before),
        "ci95_after": interval(after), "dev_n": config.eval.dev_n, "stopped_by": stopped_by,
        "steps": loop.position.step, "wall_s": round(progress.wall_s, 2), "setup_s": round(progress.setup_s, 2),
        "sandboxes_used": progress.sandboxes_used, "sandboxes_left": left, "tool_calls": progress.tool_calls,
        "infra_errors": progress.infra_errors, "kl_floor": loop.position.kl_floor, "kl_last": loop.position.kl_last,
        "syncs": progress.syncs, "syncs_verified": progress.syncs_verified,
        "head_digest": manifest.manifest_sha256 if manifest else "",
    }


@contextmanager
def _interruptible(stop: asyncio.Event) -> Any:
    """First SIGINT or SIGTERM: stop after the current step. Second: cancel now."""
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()

    def ask() -> None:
        if stop.is_set() and task is not None:
            task.cancel()
        stop.set()

    signals = (signal.SIGINT, signal.SIGTERM)
    try:
        for s in signals:
            loop.add_signal_handler(s, ask)
    except (ValueError, RuntimeError):  # not in the main thread: the caller handles signals
        signals = ()
    try:
        yield
    finally:
        for s in signals:
            loop.remove_signal_handler(s)


def newest_run(runs: Path) -> Path:
    """The run that began last. InputError if there is none."""
    found = sorted(p.parent for p in runs.glob("*/config.resolved.yaml"))
    if not found:
        raise InputError(f"no run in {runs}", field="runs-dir")
    return found[-1]
