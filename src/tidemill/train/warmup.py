"""Supervised warm-up on demonstrations: all parameters, experts on the MXFP4 grid, stopped early on purpose.

Only tokens the policy will have to choose enter the loss. The check is exact for deterministic tasks: a demonstration
whose every chosen token is the model's argmax is what greedy decoding would write. The run's evaluation through engine
and sandbox decides afterwards whether RL may start.

A warm-up asked to stop, or killed, goes on from its last checkpoint; the result is the same bit for bit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from tidemill.core.errors import TrainError
from tidemill.core.token_log import TokenLog
from tidemill.model.balance import RouterBalance
from tidemill.model.causal_lm import K3ForCausalLM
from tidemill.model.layers import RoutedExperts
from tidemill.train import checkpoint
from tidemill.train.checkpoint import Checkpoint
from tidemill.train.config import WarmupSection
from tidemill.train.samples import Sample, micro_batches

RAMP_STEPS = 10
"""Steps of linear learning-rate warm-up."""
MICRO_BATCH_TOKENS = 8192
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


def warm_up(model: K3ForCausalLM, settings: WarmupSection, *, episodes: Source, drills: Source | None,
            dev: Sequence[TokenLog], progress: Callable[[int, float, float], None],
            dev_drills: Sequence[TokenLog] = (), checkpoints: Path | None = None,
            stop: Callable[[], bool] = lambda: False) -> WarmupReport:
    """Train `model` in place until it is as good as `settings` ask, or max_steps are done.

    progress(step, loss, last accuracy) is called after each step, and `stop` asked. With a folder `checkpoints` it goes
    on from what an earlier attempt left there. Raises TrainError on a non-finite loss, WarmupStopped if `stop` says so.
    """
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            module.fake_quant = True
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
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * min(1.0, step / RAMP_STEPS)
        logs = list(episodes(step, settings.episodes))
        if drills is not None and settings.drills:
            logs += drills(step, settings.drills)
        loss = _step(model, optimizer, balance, [Sample.from_log(log, 0.0) for log in logs])
        tokens += sum(len(log) for log in logs)
        if not math.isfinite(loss):
            raise TrainError(f"warm-up step {step}: the loss is not finite", remedy="Lower warmup.lr.")
        if step % settings.check_every == 0:
            accuracy = demonstrated_accuracy(model, dev)
            skill = sampled_share(model, dev_drills)
        progress(step, loss, accuracy)
        if accuracy >= settings.stop_at and skill >= settings.drill_at:
            return WarmupReport(steps=step, loss=loss, accuracy=accuracy, drills=skill, stopped_early=True,
                                tokens=tokens)
        stopping = stop()
        if checkpoints and (stopping or time.monotonic() - kept > CHECKPOINT_S):
            tensors = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            plain = {"accuracy": accuracy, "skill": skill, "tokens": tokens}
            checkpoint.save(checkpoints, Checkpoint(step, tensors, plain))
            kept = time.monotonic()
        if stopping:
            raise WarmupStopped(f"stopped after step {step}")
    return WarmupReport(steps=settings.max_steps, loss=loss, accuracy=accuracy, drills=skill, stopped_early=False,
                        tokens=tokens)


def _step(model: K3ForCausalLM, optimizer: torch.optim.Optimizer, balance: RouterBalance,
          samples: Sequence[Sample]) -> float:
    """One optimizer step of mean cross-entropy over all chosen tokens."""
    optimizer.zero_grad(set_to_none=True)
    total = sum(s.num_sampled for s in samples)
    loss = 0.0
    for batch in micro_batches(samples, max_tokens=MICRO_BATCH_TOKENS):
        balance.mask = batch.real
        logits = model(batch.ids, select=batch.select, observer=balance)
        part = F.cross_entropy(logits.float(), batch.targets, reduction="sum") / total
        part.backward()
        loss += float(part.detach())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
    if math.isfinite(loss):
        optimizer.step()
        balance.apply()
    return loss


@torch.no_grad()
def demonstrated_accuracy(model: K3ForCausalLM, logs: Sequence[TokenLog]) -> float:
    """Share of logs whose every chosen token is the model's argmax."""
    right = 0
    for batch in micro_batches([Sample.from_log(log, 0.0) for log in logs], max_tokens=MICRO_BATCH_TOKENS):
        hits = (model(batch.ids, select=batch.select).argmax(-1) == batch.targets).float()
        spread, mask = batch.spread(hits)
        right += int((spread.sum(-1) == mask.sum(-1)).sum())
    return right / max(1, len(logs))


@torch.no_grad()
def sampled_share(model: K3ForCausalLM, logs: Sequence[TokenLog]) -> float:
    """Mean over logs of the probability that sampling at temperature 1 writes all chosen tokens; 1 for no logs."""
    if not logs:
        return 1.0
    total = 0.0
    for batch in micro_batches([Sample.from_log(log, 0.0) for log in logs], max_tokens=MICRO_BATCH_TOKENS):
        logp = model(batch.ids, select=batch.select).float().log_softmax(-1)
        spread, _ = batch.spread(logp.gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1))
        total += float(spread.sum(-1).exp().sum())
    return total / len(logs)
