"""Gradients of mean cross-entropy over samples, shared between ranks: the part that warm-up and pretraining have in
common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from tidemill.model.balance import RouterBalance
from tidemill.model.causal_lm import CausalLM
from tidemill.parallel import Group
from tidemill.train.samples import MicroBatch, Sample

Cut = Callable[[Sequence[Sample]], Iterable[MicroBatch]]
"""How a rank's samples become micro-batches."""


def accumulate(model: CausalLM, balance: RouterBalance, samples: Sequence[Sample], group: Group, *, cut: Cut,
               stop: Callable[[], bool]) -> tuple[float, bool]:
    """Add to the gradients those of the mean cross-entropy over all chosen tokens of `samples`, of which this rank
    computes its part; afterwards every rank holds the sum, and `balance` the scores of all. Returns the loss, and
    whether any rank should stop; `stop` is asked after this rank's part."""
    total = sum(s.num_sampled for s in samples)
    loss = 0.0
    for batch in cut(part_of(samples, group)):
        balance.mask = batch.real
        logits = model(batch.ids, cu_seqlens=batch.cu_seqlens, select=batch.select, observer=balance)
        part = F.cross_entropy(logits.float(), batch.targets, reduction="sum") / total
        part.backward()
        loss += float(part.detach())
    stopping = stop()
    if group.size > 1:
        loss, stopping = _sum_gradients(model, group, loss, stopping=stopping)
        balance.reduce(group)
    return loss, stopping


def part_of(samples: Sequence[Sample], group: Group) -> list[Sample]:
    """This rank's samples: every size-th by length, so that all ranks have about as much to do."""
    return sorted(samples, key=lambda s: len(s.ids))[group.rank :: group.size]


@torch.no_grad()
def _sum_gradients(model: nn.Module, group: Group, loss: float, *, stopping: bool) -> tuple[float, bool]:
    """Sum gradients, loss and the wish to stop over ranks, in one message."""
    parameters = list(model.parameters())
    parts = [(torch.zeros_like(p) if p.grad is None else p.grad).float().flatten() for p in parameters]
    summed = group.all_reduce(torch.cat([*parts, torch.tensor([loss, float(stopping)])]))
    pieces = summed[:-2].split([p.numel() for p in parameters])
    for p, piece in zip(parameters, pieces, strict=True):
        p.grad = piece.view_as(p).to(p.dtype)
    return float(summed[-2]), bool(summed[-1] > 0)
