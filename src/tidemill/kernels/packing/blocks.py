"""Cutting documents into blocks of equal size, ordered so that a walk over all documents needs no padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from tidemill.core.errors import InputError


@dataclass(frozen=True, slots=True)
class Blocks:
    """Blocks of `size` tokens of n documents, step by step, the longest document first in each step.

    tokens[N, size] int64: the token behind each place, in the flattened [B·T] (0 where there is none). spare int64:
    flat places of [N·size] without a token. counts[s]: how many documents have a block at step s, never growing;
    starts[s]: the first block of step s, with the total at the end. order[n] int64: the document of each rank.
    """

    size: int
    tokens: Tensor
    spare: Tensor
    counts: tuple[int, ...]
    starts: tuple[int, ...]
    order: Tensor

    def slots(self, first: int, last: int) -> slice:
        """The blocks of the steps first..last − 1."""
        return slice(self.starts[first], self.starts[last])

    def rows(self, blocks: slice, heads: int) -> tuple[Tensor, Tensor]:
        """For some blocks of x[B, T, H, ...] seen as [B·T·H, ...]: the row of every place [m, H, size], flattened, and
        which places are spare."""
        tokens = self.tokens[blocks]
        rows = tokens.unsqueeze(1) * heads + torch.arange(heads).view(-1, 1)
        low, high = blocks.start * self.size, blocks.stop * self.size
        spare = self.spare[(self.spare >= low) & (self.spare < high)] - low
        block, place = spare // self.size, spare % self.size
        places = (block.unsqueeze(1) * heads + torch.arange(heads)) * self.size + place.unsqueeze(1)
        return rows.flatten(), places.flatten()

    def earlier(self, lag: int) -> Tensor:
        """The block `lag` steps before each block from step `lag` on, int64."""
        starts = torch.tensor(self.starts[:-1])
        counts = torch.tensor(self.counts[lag:])
        shift = starts[lag:] - starts[: len(self.counts) - lag]
        return torch.arange(self.starts[lag], self.starts[-1]) - shift.repeat_interleave(counts)


def document_bounds(batch: int, length: int, cu_seqlens: Tensor | None) -> Tensor:
    """Bounds int64 [n + 1] of the documents in the flattened [B·T]: `cu_seqlens` itself, or one document per row.

    InputError if cu_seqlens comes with a batch, or is not int64 [n + 1] rising from 0 to T.
    """
    if cu_seqlens is None:
        return torch.arange(batch + 1) * length
    if batch != 1:
        raise InputError(f"cu_seqlens with a batch of {batch}: packed documents stand in one row", field="cu_seqlens",
                         remedy="Flatten the batch to [1, B·T] and count the documents over all of it.")
    if cu_seqlens.dtype is not torch.int64 or cu_seqlens.dim() != 1 or cu_seqlens.numel() < 2:
        raise InputError(f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}: expected int64 [n + 1]",
                         field="cu_seqlens")
    if int(cu_seqlens[0]) != 0 or int(cu_seqlens[-1]) != length or not bool((cu_seqlens.diff() > 0).all()):
        raise InputError(f"cu_seqlens = {_shortened(cu_seqlens.tolist())}: expected numbers rising from 0 to {length}",
                         field="cu_seqlens", remedy="Leave out empty documents; the last number is the row's length.")
    return cu_seqlens


def cut(bounds: Tensor, size: int) -> Blocks:
    """Blocks of `size` tokens of the documents between the `bounds` int64 [n + 1]; one without tokens has none."""
    begins, lengths = bounds[:-1], bounds.diff()
    numbers = -(-lengths // size)
    order = torch.argsort(numbers, descending=True, stable=True)
    ranked = numbers[order]
    steps = int(ranked[0])
    # Documents with more than s blocks: the ranks sorted the other way, searched for s.
    counts = ranked.numel() - torch.searchsorted(ranked.flip(0).contiguous(), torch.arange(steps), right=True)
    starts = [0, *accumulate(counts.tolist())]
    step = torch.arange(steps).repeat_interleave(counts)
    rank = torch.arange(starts[-1]) - torch.tensor(starts[:-1]).repeat_interleave(counts)
    document = order[rank]
    offset = step.unsqueeze(1) * size + torch.arange(size)
    inside = offset < lengths[document].unsqueeze(1)
    tokens = torch.where(inside, begins[document].unsqueeze(1) + offset, 0)
    spare = (~inside).flatten().nonzero().squeeze(1)
    return Blocks(size, tokens, spare, tuple(counts.tolist()), tuple(starts), order)


def _shortened(numbers: list[int]) -> str:
    return str(numbers) if len(numbers) <= 8 else f"[{', '.join(map(str, numbers[:4]))}, ..., {numbers[-1]}]"
