"""A training from start to model folder: prepared once, carried on in as many pieces as it takes.

A run folder holds config.resolved.yaml, env.json, data.json (what the data are), start/ (configuration and tokenizer),
events.jsonl, tensorboard/, checkpoints/, and in the end model/ and summary.json. Stopped, killed or out of time, it
goes on from its last checkpoint and ends with the same bits (same number of ranks, one thread each).
"""

from __future__ import annotations

import math
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tidemill.core.config import load_yaml, parse_config, set_dotted
from tidemill.core.errors import ConfigError, InputError, TrainError
from tidemill.core.files import read_jsonl, write_json
from tidemill.core.launcher import end_leftovers
from tidemill.model.balance import RouterBalance
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.chat.codec import ChatCodec
from tidemill.model.chat.tokenizer import Tokenizer
from tidemill.model.config import ModelConfig
from tidemill.model.inventory import total_parameters
from tidemill.model.shipped import find_model, shipped_names
from tidemill.parallel import Group
from tidemill.train import checkpoint
from tidemill.train.checkpoint import Checkpoint
from tidemill.train.metrics import Listener, Metrics
from tidemill.train.parts import preset_config
from tidemill.train.pretrain.held_out import HeldOutLoss, measure
from tidemill.train.pretrain.mixture import Mixture
from tidemill.train.pretrain.parameters import Optimizers
from tidemill.train.pretrain.recipe import Recipe
from tidemill.train.pretrain.sources import Source, open_source
from tidemill.train.pretrain.vocabulary import trained_vocabulary
from tidemill.train.ranks import Ranks, member
from tidemill.train.run_dir import RunDir
from tidemill.train.samples import packed_batches
from tidemill.train.supervised import accumulate

FOLDERS = ("checkpoints", "tensorboard")
DATA, TRAINING = "data.json", "training.json"
"""Beside the weights in a model folder: what the data were, and the summary of the training."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a piece of a training ended. `model` is the folder of the trained model if all steps are done."""

    stopped_by: str
    """`steps` (all done), or what `stop` said."""
    step: int
    run: Path
    model: Path | None


class Stopped(Exception):  # noqa: N818 - nothing went wrong
    """The training was asked to stop and has left a checkpoint."""

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}")
        self.step = step


Stop = Callable[[], str]
"""Why to stop now; empty: go on."""


def never() -> str:
    return ""


def start(recipe: Recipe, runs: Path) -> RunDir:
    """A new run folder with tokenizer and description of the data. Raises ConfigError or InputError, and leaves no
    folder, if recipe or data are no good."""
    tokenizer = Tokenizer.load(initial_model(recipe)) if recipe.kind == "sft" else trained_vocabulary(recipe)
    config = ModelConfig.read(initial_model(recipe)) if recipe.kind == "sft" else _model_config(recipe, tokenizer)
    limit = config.text_config.max_position_embeddings
    if recipe.context > limit:
        raise ConfigError(f"context = {recipe.context}: the model takes {limit} positions", field="context")
    sources = _sources(recipe, tokenizer)
    run = RunDir.create(runs, recipe, FOLDERS)
    tokenizer.save(_start_folder(run))
    config.write(_start_folder(run))
    _describe_data(run, sources)
    return run


def reopen(path: Path) -> tuple[RunDir, Recipe]:
    """An existing run. InputError or ConfigError if the folder holds none."""
    run = RunDir.open(path)
    return run, parse_config(Recipe, load_yaml(path / "config.resolved.yaml"), source=str(path))


def branch(path: Path, overrides: Sequence[str], runs: Path) -> tuple[RunDir, Recipe]:
    """A new run that goes on from the last checkpoint of the one at `path` with values of its recipe changed; the old
    run stays as it is. So a plateau (schedule wsd) is brought to an end early: with fewer schedule.steps. ConfigError
    if the change needs another model or vocabulary, InputError if there is no checkpoint or too few steps are left."""
    source, recipe = reopen(path)
    data = load_yaml(path / "config.resolved.yaml")
    for assignment in overrides:
        set_dotted(data, assignment)
    changed = parse_config(Recipe, data, source=f"{path} with --set")
    for name in ("kind", "model", "vocabulary", "init"):
        if getattr(changed, name) != getattr(recipe, name):
            raise ConfigError(f"{name} cannot be changed in the middle of a training", field=name,
                              remedy="Start a new one.")
    saved = checkpoint.load_newest(source.checkpoints)
    if saved is None or saved.step >= changed.schedule.steps:
        raise InputError(f"{path}: its last checkpoint is at step {saved.step if saved else 0} of "
                         f"{changed.schedule.steps}", field="branch",
                         remedy="Give more schedule.steps, or resume the training first.")
    run = RunDir.create(runs, changed, FOLDERS)
    shutil.copytree(_start_folder(source), _start_folder(run))
    sources = _sources(changed, Tokenizer.load(_start_folder(run)))
    _describe_data(run, sources, branched_from={"run": source.name, "step": saved.step})
    checkpoint.save(run.checkpoints, saved)
    return run, changed


def execute(recipe: Recipe, run: RunDir, *, listeners: tuple[Listener, ...] = (), stop: Stop = never) -> Result:
    """Train from the last checkpoint to the last step, or until `stop` says why not. Raises TrainError (loss not
    finite, a rank lost, disk full); what was saved stays valid."""
    removed = end_leftovers(run.ledger)
    ranks = Ranks(size=recipe.ranks, what="training", module=__name__, arguments=[str(run.path)],
                  folder=run.path / "ranks", ledger=run.ledger, threads=recipe.threads,
                  remedy="Resume the run: it goes on from the last checkpoint.")
    with Metrics(run, listeners=listeners) as metrics:
        metrics.event("start", recipe=recipe.name, seed=recipe.seed, max_steps=recipe.schedule.steps, removed=removed)
        reasons: list[str] = []

        def stopping() -> bool:
            reasons.extend(filter(None, [stop()]))
            return bool(reasons)

        try:
            model, last = ranks.run(lambda group: _Rank(recipe, run, group, metrics).train(stopping))
        except Stopped as e:
            metrics.event("stop", stopped_by=reasons[0], step=e.step)
            return Result(stopped_by=reasons[0], step=e.step, run=run.path, model=None)
        return _finish(recipe, run, metrics, model, last)


def initial_model(recipe: Recipe) -> Path:
    """Folder of the model an sft recipe goes on from."""
    folder = find_model(recipe.init)
    if folder is not None:
        return folder
    raise ConfigError(f"init = {recipe.init!r}: neither a model folder (it has no config.json) nor one of "
                      f"{', '.join(shipped_names()) or 'no shipped models'}", field="init")


def _sources(recipe: Recipe, tokenizer: Tokenizer) -> list[Source]:
    codec = ChatCodec(tokenizer)
    return [open_source(section, codec, seed=recipe.seed, held_out=recipe.held_out.share, context=recipe.context)
            for section in recipe.data]


def _describe_data(run: RunDir, sources: Sequence[Source], **more: Any) -> None:
    """data.json."""
    tokenizer = Tokenizer.load(_start_folder(run))
    write_json(run.path / DATA, {
        "tokenizer": tokenizer.digest, "vocabulary": tokenizer.size, **more,
        "sources": {s.section.name: {"licence": s.section.licence, "package": s.section.package,
                                     "weight": s.section.weight, **s.describe()} for s in sources},
    })


def _start_folder(run: RunDir) -> Path:
    return run.path / "start"


def _model_config(recipe: Recipe, tokenizer: Tokenizer) -> ModelConfig:
    assert recipe.model is not None
    return preset_config(recipe.model, tokenizer.size).with_control(tokenizer.control)


class _Rank:
    """One rank's part of a training; the same arguments everywhere make the same model everywhere. `metrics` is None
    in all ranks but the first."""

    def __init__(self, recipe: Recipe, run: RunDir, group: Group, metrics: Metrics | None) -> None:
        torch.set_num_threads(recipe.threads)
        self._recipe, self._run, self._group, self._metrics = recipe, run, group, metrics
        tokenizer = Tokenizer.load(_start_folder(run))
        self._end = tokenizer.control.eos
        self._sources = _sources(recipe, tokenizer)
        self._mixture = Mixture(self._sources, context=recipe.context)
        if recipe.kind == "pretrain":
            self._model = CausalLM(ModelConfig.read(_start_folder(run)), seed=recipe.seed)
        else:
            self._model = BaseStore.open(initial_model(recipe)).model().requires_grad_(True)
        self._optimizers = Optimizers(self._model, recipe.optimizer)
        self._balance = RouterBalance(self._model)
        self._cut = partial(packed_batches, max_tokens=recipe.micro_batch_tokens)
        self._kept = time.monotonic()

    def train(self, stop: Callable[[], bool]) -> tuple[CausalLM, list[HeldOutLoss]]:
        """All steps that are left. Returns the model and its last measurement; raises Stopped."""
        first = self._restore() + 1
        schedule = self._recipe.schedule
        for step in range(first, schedule.steps + 1):
            stopping = self._step(step, stop)
            due = stopping or step == schedule.steps or time.monotonic() - self._kept > self._recipe.checkpoint_s
            if due and self._group.rank == 0:
                self._save(step)
            if stopping:
                raise Stopped(step)
            if step % self._recipe.held_out.every == 0 and step < schedule.steps:
                self._measure(step, self._recipe.held_out.tokens)
        return self._model, self._measure(schedule.steps, self._recipe.held_out.last_tokens)

    def _step(self, step: int, stop: Callable[[], bool]) -> bool:
        """One optimizer step; returns whether to stop after it."""
        recipe, started = self._recipe, time.monotonic()
        quantised = step > recipe.mxfp4_from * recipe.schedule.steps
        quantised = quantised and self._model.config.text_config.quantize_experts
        self._model.set_quantization(recipe.quantization if quantised else "none")
        samples = self._mixture.batch(recipe.batch_tokens)
        self._optimizers.zero_grad()
        loss, stopping = accumulate(self._model, self._balance, samples, self._group, cut=self._cut, stop=stop)
        norm = self._optimizers.clip()
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainError(f"step {step}: loss {loss}, gradient norm {norm}: not finite",
                             remedy="Lower optimizer.lr; the checkpoint before this step is valid.")
        share = recipe.schedule.share(step)
        self._optimizers.step(share)
        self._balance.apply()
        if self._metrics is not None:
            tokens = sum(len(s.ids) for s in samples)
            self._metrics.event("update", step=step, tokens=sum(self._mixture.tokens.values()), loss=round(loss, 6),
                                grad_norm=round(norm, 6), lr=recipe.optimizer.lr * share,
                                tokens_per_s=round(tokens / (time.monotonic() - started), 1))
        return stopping

    def _measure(self, step: int, tokens: int) -> list[HeldOutLoss]:
        recipe = self._recipe
        found: list[HeldOutLoss] = []
        for source in self._sources:
            result = measure(self._model, source, context=recipe.context, max_tokens=tokens, group=self._group,
                             cut=self._cut, end_id=self._end)
            if result.documents:
                found.append(result)
                if self._metrics is not None:
                    self._metrics.event("held_out", step=step, **asdict(result))
        return found

    def _save(self, step: int) -> None:
        started = time.monotonic()
        tensors = {"model": self._model.state_dict(), "optimizers": self._optimizers.state_dict()}
        folder = checkpoint.save(self._run.checkpoints, Checkpoint(step, tensors, {"mixture": self._mixture.state()}))
        self._kept = time.monotonic()
        if self._metrics is not None:
            self._metrics.event("checkpoint", step=step, nbytes=sum(p.stat().st_size for p in folder.iterdir()),
                                seconds=round(self._kept - started, 3))

    def _restore(self) -> int:
        """The last step that is done."""
        saved = checkpoint.load_newest(self._run.checkpoints)
        if saved is None:
            return 0
        self._model.load_state_dict(saved.tensors["model"])
        self._optimizers.load_state_dict(saved.tensors["optimizers"])
        self._mixture.restore(saved.plain["mixture"])
        if self._metrics is not None:
            self._metrics.event("resume", from_step=saved.step, removed=[])
        return saved.step


def _finish(recipe: Recipe, run: RunDir, metrics: Metrics, model: CausalLM, last: list[HeldOutLoss]) -> Result:
    """Write the model folder and the summary."""
    folder = run.path / "model"
    write_base(folder, model)
    Tokenizer.load(_start_folder(run)).save(folder)
    tokens = max((row["tokens"] for row in read_jsonl(run.events) if row["event"] == "update"), default=0)
    summary = {
        "recipe": recipe.name, "kind": recipe.kind, "seed": recipe.seed, "steps": recipe.schedule.steps,
        "tokens": tokens, "parameters": total_parameters(model.config.text_config),
        "held_out": [asdict(row) for row in last],
    }
    # The model folder says by itself what it was trained on, and how far.
    shutil.copyfile(run.path / DATA, folder / DATA)
    write_json(folder / TRAINING, summary)
    write_json(run.path / "summary.json", summary)
    metrics.event("stop", stopped_by="steps", step=recipe.schedule.steps)
    return Result(stopped_by="steps", step=recipe.schedule.steps, run=run.path, model=folder)


def main(argv: list[str]) -> None:
    """A rank beside the run's own process."""
    with member(argv) as ((path,), group), suppress(Stopped):
        run = RunDir(Path(path))
        recipe = parse_config(Recipe, load_yaml(run.path / "config.resolved.yaml"), source=path)
        _Rank(recipe, run, group, None).train(lambda: False)


if __name__ == "__main__":
    main(sys.argv[1:])
