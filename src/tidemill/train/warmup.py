"""Supervised warm-up on demonstrations: all parameters, experts on the MXFP4 grid, stopped early on purpose.

Only tokens the policy will have to choose enter the loss. The check is exact for deterministic tasks: a demonstration
whose every chosen token is the model's argmax is what greedy decoding would write. The run's evaluation through engine
and sandbox decides afterwards whether RL may start.

A warm-up asked to stop, or killed, goes on from its last checkpoint; the result is the same bit for bit.

Several ranks may share it (tidemill.train.warmup_ranks): each takes its part of every batch, gradients and counts are
summed, and all hold the same model at every step. The result depends on the number of ranks only by rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tidemill.core.errors import TrainError
from tidemill.core.token_log import TokenLog
from tidemill.model.balance import RouterBalance
from tidemill.model.causal_lm import CausalLM
from tidemill.parallel import Group, SoloGroup
from tidemill.train import checkpoint
from tidemill.train.checkpoint import Checkpoint
from tidemill.train.config import WarmupSection
from tidemill.train.samples import MicroBatch, Sample, micro_batches
from tidemill.train.supervised import accumulate, part_of

RAMP_STEPS = 10
"""Steps of linear learning-rate warm-up."""
MICRO_BATCH_TOKENS = 8192
ALONE = SoloGroup()
CHECKPOINT_S = 20.0
"""Seconds between checkpoints."""

Source = Callable[[int, int], Sequence[TokenLog]]
"""(step, count) -> demonstrations; a pure function of its arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupReport:
    """How the warm-up ended. `accuracy` is the share of dev demonstrations greedy decoding would write."""

    steps: int
    loss: float
    accuracy: float
    drills: float
    """Mean probability of sampling a drill correctly."""
    stopped_early: bool
    tokens: int


class WarmupStopped(Exception):  # noqa: N818 - nothing went wrong
    """The warm-up was asked to stop and has left a checkpoint."""


def warm_up(model: CausalLM, settings: WarmupSection, *, episodes: Source, drills: Source | None,
            dev: Sequence[TokenLog], progress: Callable[[int, float, float], None],
            dev_drills: Sequence[TokenLog] = (), checkpoints: Path | None = None,
            stop: Callable[[], bool] = lambda: False, group: Group = ALONE) -> WarmupReport:
    """Train `model` in place until it is as good as `settings` ask, or max_steps are done.

    progress(step, loss, last accuracy) is called after each step. `stop` is asked before each step; one step later the
    warm-up ends. With a folder `checkpoints` it goes on from what an earlier attempt left there, and rank 0 writes.
    Every rank of `group` is given the same model and arguments; the `stop` of any of them stops all.
    Raises TrainError on a non-finite loss, WarmupStopped if `stop` says so.
    """
    model.set_quantization("weights")
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.lr, betas=(0.9, 0.98),
                                  weight_decay=settings.weight_decay, foreach=True)
    balance = RouterBalance(model)
    accuracy, skill, loss, tokens, first = 0.0, 0.0, math.nan, 0, 1
    saved = checkpoint.load_newest(checkpoints) if checkpoints else None
    if saved:
        model.load_state_dict(saved.tensors["model"])
        optimizer.load_state_dict(saved.tensors["optimizer"])
        accuracy, skill, tokens = (saved.plain[k] for k in ("accuracy", "skill", "tokens"))
        first = saved.step + 1
    kept = time.monotonic()
    for step in range(first, settings.max_steps + 1):
        for part in optimizer.param_groups:
            part["lr"] = settings.lr * min(1.0, step / RAMP_STEPS)
        logs = list(episodes(step, settings.episodes))
        if drills is not None and settings.drills:
            logs += drills(step, settings.drills)
        samples = [Sample.from_log(log, 0.0) for log in logs]
        loss, stopping = _step(model, optimizer, balance, samples, group, stopping=stop())
        tokens += sum(len(log) for log in logs)
        if not math.isfinite(loss):
            raise TrainError(f"warm-up step {step}: the loss is not finite", remedy="Lower warmup.lr.")
        if step % settings.check_every == 0:
            accuracy = demonstrated_accuracy(model, dev, group)
            skill = sampled_share(model, dev_drills, group)
        progress(step, loss, accuracy)
        # Greedy decoding flips between habits from one check to the next: above the band is no place to stop either.
        if settings.stop_at <= accuracy <= settings.band[1] and skill >= settings.drill_at:
            return WarmupReport(steps=step, loss=loss, accuracy=accuracy, drills=skill, stopped_early=True,
                                tokens=tokens)
        if checkpoints and group.rank == 0 and (stopping or time.monotonic() - kept > CHECKPOINT_S):
            tensors = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            plain = {"accuracy": accuracy, "skill": skill, "tokens": tokens}
            checkpoint.save(checkpoints, Checkpoint(step, tensors, plain))
            kept = time.monotonic()
        if stopping:
            raise WarmupStopped(f"stopped after step {step}")
    return WarmupReport(steps=settings.max_steps, loss=loss, accuracy=accuracy, drills=skill, stopped_early=False,
                        tokens=tokens)


def _step(model: CausalLM, optimizer: torch.optim.Optimizer, balance: RouterBalance, samples: Sequence[Sample],
          group: Group, *, stopping: bool) -> tuple[float, bool]:
    """One optimizer step of mean cross-entropy over all chosen tokens, of which this rank computes its part. Returns
    the loss, and whether any rank is `stopping`."""
    optimizer.zero_grad(set_to_none=True)
    loss, stopping = accumulate(model, balance, samples, group, cut=_padded, stop=lambda: stopping)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
    if math.isfinite(loss):
        optimizer.step()
        balance.apply()
    return loss, stopping


@torch.no_grad()
def demonstrated_accuracy(model: CausalLM, logs: Sequence[TokenLog], group: Group) -> float:
    """Share of logs whose every chosen token is the model's argmax."""
    right = 0.0
    for batch in _batches(logs, group):
        hits = (model(batch.ids, select=batch.select).argmax(-1) == batch.targets).float()
        spread, mask = batch.spread(hits)
        right += int((spread.sum(-1) == mask.sum(-1)).sum())
    return float(group.all_reduce(torch.tensor(right))) / max(1, len(logs))


@torch.no_grad()
def sampled_share(model: CausalLM, logs: Sequence[TokenLog], group: Group) -> float:
    """Mean over logs of the probability that sampling at temperature 1 writes all chosen tokens; 1 for no logs."""
    if not logs:
        return 1.0
    total = 0.0
    for batch in _batches(logs, group):
        logp = model(batch.ids, select=batch.select).float().log_softmax(-1)
        spread, _ = batch.spread(logp.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1))
        total += float(spread.sum(-1).exp().sum())
    return float(group.all_reduce(torch.tensor(total))) / len(logs)


def _padded(samples: Sequence[Sample]) -> Iterator[MicroBatch]:
    return micro_batches(samples, max_tokens=MICRO_BATCH_TOKENS)


def _batches(logs: Sequence[TokenLog], group: Group) -> Iterator[MicroBatch]:
    """This rank's part of `logs`."""
    return _padded(part_of([Sample.from_log(log, 0.0) for log in logs], group))
