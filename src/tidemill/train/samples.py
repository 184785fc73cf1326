"""What the optimizer sees: token sequences with masks, behaviour log-probs and advantages, in micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tidemill.core.token_log import TokenLog

MAX_STRETCH = 1.3
"""Padding allowed within a micro-batch; more would cost more than another pass."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One episode as the loss needs it. Lists run over tokens; `rollout_logprobs` are 0 where nothing was sampled."""

    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float

    @classmethod
    def from_log(cls, log: TokenLog, advantage: float) -> Sample:
        """Copy a token log up to its last sampled token: what was given after it has no part in the loss."""
        end = max((i + 1 for i, sampled in enumerate(log.sampled) if sampled), default=0)
        return cls(tuple(log.ids[:end]), tuple(log.sampled[:end]), tuple(log.logprobs[:end]), advantage)

    @property
    def num_sampled(self) -> int:
        return sum(self.sampled)


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Padded sequences, or packed ones. Positions `select` of the flattened [B, T] predict the sampled tokens
    `targets` [S].

    cu_seqlens  int64 [n + 1] where n sequences stand behind each other in one row; None: each has a row of its own
    rows[S]     which sequence each belongs to; column[S] its running number within the sequence
    """

    ids: Tensor
    cu_seqlens: Tensor | None
    real: Tensor
    """[B, T] bool: True for tokens, False for padding."""
    select: Tensor
    targets: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    rows: Tensor
    columns: Tensor
    samples: tuple[int, ...]
    """Indices into the list the batch was cut from."""

    @property
    def num_tokens(self) -> int:
        """Padded tokens of the forward pass."""
        return self.ids.numel()

    def spread(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Values [S] as ([n, N], mask [n, N]) with N the largest number of sampled tokens of a sequence."""
        width = int(self.columns.max()) + 1 if len(self.columns) else 1
        shape = (len(self.samples), width)
        index = self.rows * width + self.columns
        flat = values.new_zeros(shape[0] * width).index_copy(0, index, values)
        mask = torch.zeros(shape[0] * width, dtype=values.dtype).index_fill_(0, index, 1.0)
        return flat.view(shape), mask.view(shape)


def micro_batches(samples: Sequence[Sample], *, max_tokens: int) -> Iterator[MicroBatch]:
    """Sort by length (stable), then cut so that padded tokens stay below max_tokens (one sequence at least) and no
    sequence is padded to more than MAX_STRETCH times its length."""
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].ids))
    start = 0
    while start < len(order):
        end = start + 1
        shortest = len(samples[order[start]].ids)
        while end < len(order):
            length = len(samples[order[end]].ids)
            if (end + 1 - start) * length > max_tokens or length > MAX_STRETCH * shortest:
                break
            end += 1
        yield _pad([samples[i] for i in order[start:end]], tuple(order[start:end]))
        start = end


def packed_batches(samples: Sequence[Sample], *, max_tokens: int) -> Iterator[MicroBatch]:
    """Sequences behind each other in one row, in their order, cut so that a row has at most max_tokens (one sequence
    at least). Nothing is padded."""
    start = 0
    while start < len(samples):
        end, tokens = start + 1, len(samples[start].ids)
        while end < len(samples) and tokens + len(samples[end].ids) <= max_tokens:
            tokens += len(samples[end].ids)
            end += 1
        yield _pack(samples[start:end], tuple(range(start, end)))
        start = end


def _pad(samples: Sequence[Sample], indices: tuple[int, ...]) -> MicroBatch:
    width = max(len(s.ids) for s in samples)
    ids = torch.zeros((len(samples), width), dtype=torch.int64)
    real = torch.arange(width) < torch.tensor([len(s.ids) for s in samples]).unsqueeze(-1)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = torch.tensor(sample.ids)
    return _batch(samples, indices, ids, real, None, begins=[row * width for row in range(len(samples))])


def _pack(samples: Sequence[Sample], indices: tuple[int, ...]) -> MicroBatch:
    ids = torch.tensor([[i for s in samples for i in s.ids]], dtype=torch.int64)
    bounds = [0, *accumulate(len(s.ids) for s in samples)]
    return _batch(samples, indices, ids, torch.ones_like(ids, dtype=torch.bool), torch.tensor(bounds),
                  begins=bounds[:-1])


def _batch(samples: Sequence[Sample], indices: tuple[int, ...], ids: Tensor, real: Tensor, cu_seqlens: Tensor | None, *,
           begins: Sequence[int]) -> MicroBatch:
    """The batch of sequences that begin at the flat positions `begins`."""
    select: list[int] = []
    targets: list[int] = []
    logprobs: list[float] = []
    advantages: list[float] = []
    rows: list[int] = []
    columns: list[int] = []
    for row, (sample, begin) in enumerate(zip(samples, begins, strict=True)):
        column = 0
        for t, sampled in enumerate(sample.sampled):
            if sampled and t > 0:
                select.append(begin + t - 1)
                targets.append(sample.ids[t])
                logprobs.append(sample.rollout_logprobs[t])
                advantages.append(sample.advantage)
                rows.append(row)
                columns.append(column)
                column += 1
    return MicroBatch(
        ids=ids, cu_seqlens=cu_seqlens, real=real, select=torch.tensor(select, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        rollout_logprobs=torch.tensor(logprobs), advantages=torch.tensor(advantages),
        rows=torch.tensor(rows, dtype=torch.int64), columns=torch.tensor(columns, dtype=torch.int64), samples=indices,
    )
