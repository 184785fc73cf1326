"""What a model keeps of the tokens it has seen, so that it can go on from them: KDA states, the inputs before each
convolution, MLA latents.

For walks through the training form (tidemill.model.hf); the engine keeps the same things in pools of its own. New
tokens of all sequences come packed in one row, without padding. Nothing here has a gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels.mla import PAGE
from tidemill.model.config import TextConfig

_TAPS = 3


@dataclass(frozen=True, slots=True)
class Step:
    """The new tokens of one forward pass, packed in one row.

    rows[n]        sequences that have some, ascending, int64
    cu_seqlens     bounds of their tokens in the row, int64 [n + 1]
    before[n]      tokens each of them had before, int64
    """

    rows: Tensor
    cu_seqlens: Tensor
    before: Tensor

    @property
    def sequences(self) -> Tensor:
        """The sequence of every new token, int64 [R]."""
        return self.rows.repeat_interleave(self.cu_seqlens.diff())

    @property
    def positions(self) -> Tensor:
        """The position of every new token in its sequence, int64 [R]."""
        starts = self.before - self.cu_seqlens[:-1]
        return torch.arange(int(self.cu_seqlens[-1])) + starts.repeat_interleave(self.cu_seqlens.diff())

    @property
    def begins(self) -> bool:
        """Whether none of the sequences has a past."""
        return not bool(self.before.any())


class KdaPast:
    """state[B, H, K, V] fp32 and the last three inputs of the convolutions of q, k and v, taps[B, 3, 3P]."""

    def __init__(self, config: TextConfig, batch: int) -> None:
        linear = config.linear_attn_config
        self.state = torch.zeros((batch, linear.num_heads, linear.head_dim, linear.head_dim))
        self.taps = torch.zeros((batch, _TAPS, 3 * linear.width), dtype=config.torch_dtype)

    def read(self, step: Step) -> tuple[Tensor, Tensor]:
        """(state[n, H, K, V], taps[n, 3, 3P]) of the step's sequences, copies."""
        return self.state.index_select(0, step.rows), self.taps.index_select(0, step.rows)

    def write(self, step: Step, state: Tensor, taps: Tensor) -> None:
        self.state.index_copy_(0, step.rows, state)
        self.taps.index_copy_(0, step.rows, taps.to(self.taps.dtype))

    def select(self, index: Tensor) -> None:
        self.state, self.taps = self.state.index_select(0, index), self.taps.index_select(0, index)


class MlaPast:
    """Latents [normalised c | shared p] in pages of 64 tokens, as many for every sequence: pages[B, M, 64, r + p]."""

    def __init__(self, config: TextConfig, batch: int) -> None:
        width = config.kv_lora_rank + config.qk_rope_head_dim
        self.pages = torch.zeros((batch, 0, PAGE, width), dtype=config.torch_dtype)

    def append(self, step: Step, latents: Tensor) -> None:
        """Keep latents[R, r + p] of the step's tokens. Room grows by doubling."""
        positions = step.positions
        need, (batch, have, _, width) = int(positions.max()) // PAGE + 1, self.pages.shape
        if need > have:
            more = self.pages.new_zeros((batch, max(need, 2 * have) - have, PAGE, width))
            self.pages = torch.cat([self.pages, more], dim=1)
        self.pages[step.sequences, positions // PAGE, positions % PAGE] = latents

    def table(self, step: Step) -> Tensor:
        """The pages of every new token's sequence as numbers into `flat`, int64 [R, M]."""
        return step.sequences.unsqueeze(1) * self.pages.shape[1] + torch.arange(self.pages.shape[1])

    @property
    def flat(self) -> Tensor:
        """All pages, [B·M, 64, r + p]."""
        return self.pages.flatten(0, 1)

    def select(self, index: Tensor) -> None:
        self.pages = self.pages.index_select(0, index)


LayerPast = tuple[Any, Step]
"""A layer's KdaPast or MlaPast with the step that is being taken."""


class Past:
    """The past of B sequences in every layer; lengths[B] int64. Mutated by every forward pass that is given it."""

    def __init__(self, config: TextConfig, batch: int) -> None:
        self.lengths = torch.zeros(batch, dtype=torch.int64)
        self.layers: list[KdaPast | MlaPast] = [
            (MlaPast if layer in config.mla_layers else KdaPast)(config, batch)
            for layer in range(config.num_hidden_layers)
        ]
        self._limit = config.max_position_embeddings

    def step(self, counts: Tensor) -> Step:
        """A step of counts[B] int64 >= 0 new tokens, in the order of the sequences. InputError if there are none, the
        batch is another, or a sequence grows beyond max_position_embeddings."""
        if counts.shape != self.lengths.shape:
            raise InputError(f"{counts.shape[0]} sequences go on from a past of {self.lengths.shape[0]}",
                             field="past", remedy="Begin with a new one.")
        if not bool(counts.any()):
            raise InputError("no sequence has a new token", field="input_ids")
        longest = int((self.lengths + counts).max())
        if longest > self._limit:
            raise InputError(f"a sequence of {longest} tokens: the model takes {self._limit} positions",
                             field="input_ids")
        rows = counts.nonzero().squeeze(1)
        cu_seqlens = torch.cat([counts.new_zeros(1), counts[rows].cumsum(0)])
        return Step(rows, cu_seqlens, self.lengths[rows])

    def advance(self, step: Step) -> None:
        """Count a step's tokens once every layer has kept them."""
        self.lengths[step.rows] += step.cu_seqlens.diff()

    def select(self, index: Tensor) -> None:
        """Keep sequences index[B'] int64, in this order; one may come several times (beams)."""
        self.lengths = self.lengths.index_select(0, index)
        for layer in self.layers:
            layer.select(index)
