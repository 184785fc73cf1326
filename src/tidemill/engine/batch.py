"""The index arrays of one forward over rows of many sequences, built with numpy and no Python loop over tokens.

Rows are ordered by token index first: row (j, i) is the j-th new token of the i-th sequence, sequences sorted by
falling number of new tokens. So the sequences that still have a j-th token are the first `active[j]`, their rows lie
together, and the recurrence over j works on contiguous slices. The order of rows never changes a row's bits; it only
makes them cheap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.engine.config import PAGE_SIZE
from tidemill.kernels.linear import padded_rows

I64 = NDArray[np.int64]
TAPS = 4
"""Width of the short convolution: three carried inputs and the current one."""


@dataclass(frozen=True, slots=True)
class Batch:
    """B sequences, R rows (before padding). All tensors int64.

    order[B]       index into the caller's list of sequences for batch position i
    slots[B]       state slot of batch position i
    slot_range     (first, end) if the slots are consecutive, so that state can be used in place, else None
    counts[B]      new tokens of each
    token_ids[Rp]  token of each row, 0 in the Rp - R padding rows
    positions[R]   absolute position of each row
    starts[B]      tokens computed before the step
    row_sequence[R]  batch position of each row's sequence
    active         number of sequences that have a j-th token, for each j
    offsets        first row of each j
    latent_rows[R] where each row's latent goes in the pages seen as [num_pages * 64, width]
    taps[R, 4] | None  rows of [carried 3 B; new R] that feed each row's convolution, oldest first; None if every
                   sequence has one new token (then they are the carried three and the row itself)
    carry[B, 3] | None rows of the same that are carried on
    """

    order: I64
    slots: Tensor
    slot_range: tuple[int, int] | None
    counts: I64
    token_ids: Tensor
    positions: Tensor
    starts: Tensor
    row_sequence: Tensor
    active: tuple[int, ...]
    offsets: tuple[int, ...]
    latent_rows: Tensor
    taps: Tensor | None
    carry: Tensor | None
    num_rows: int

    @property
    def num_sequences(self) -> int:
        return len(self.counts)

    def rows_of(self, sequence: I64, token: I64) -> I64:
        """Rows of the token-th new token (0-based) of batch positions `sequence`."""
        return np.asarray(self.offsets, dtype=np.int64)[token] + sequence


def build_batch(slots: I64, starts: I64, counts: I64, tokens: I64, page_table: I64) -> Batch:
    """Lay out one step.

    slots[B], starts[B] (tokens already computed), counts[B] >= 1; tokens[sum(counts)] sequence after sequence;
    page_table[num_slots, pages_per_sequence].
    """
    first_token = np.cumsum(counts) - counts
    longest = int(counts.max())
    # Slot order among equals often makes the slots consecutive, so that the states can be used in place.
    order = np.lexsort((slots, -counts))
    slots, starts, counts, first_token = slots[order], starts[order], counts[order], first_token[order]
    active = len(counts) - np.searchsorted(counts[::-1], np.arange(1, longest + 1), side="left")
    offsets = np.cumsum(active) - active
    num_rows = int(counts.sum())
    token = np.repeat(np.arange(longest), active)
    sequence = np.arange(num_rows) - offsets[token]
    ids = np.zeros(padded_rows(num_rows), dtype=np.int64)
    ids[:num_rows] = tokens[first_token[sequence] + token]
    positions = starts[sequence] + token
    latent_rows = page_table[slots[sequence], positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
    taps = carry = None
    if longest > 1:
        back = np.arange(1 - TAPS, 1)
        taps = _tap_rows(sequence[:, None], token[:, None] + back, offsets, len(counts))
        carry = _tap_rows(np.arange(len(counts))[:, None], counts[:, None] + back[:-1], offsets, len(counts))
    low = int(slots[0])
    contiguous = bool((slots == np.arange(low, low + len(slots))).all())
    return Batch(
        order=order, slots=_tensor(slots), slot_range=(low, low + len(slots)) if contiguous else None, counts=counts,
        token_ids=_tensor(ids), positions=_tensor(positions), starts=_tensor(starts), row_sequence=_tensor(sequence),
        active=tuple(active.tolist()), offsets=tuple(offsets.tolist()), latent_rows=_tensor(latent_rows),
        taps=None if taps is None else _tensor(taps), carry=None if carry is None else _tensor(carry),
        num_rows=num_rows,
    )


def _tap_rows(sequence: I64, token: I64, offsets: I64, num_sequences: int) -> I64:
    """Rows of [carried; new] of tokens that may lie before the step (negative: carried, oldest first)."""
    carried = sequence * (TAPS - 1) + (TAPS - 1) + token
    new = num_sequences * (TAPS - 1) + offsets[np.maximum(token, 0)] + sequence
    return np.where(token < 0, carried, new)


def _tensor(array: I64) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64))
