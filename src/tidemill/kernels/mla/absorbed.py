"""Multi-head latent attention over paged latents, the engine's form in every phase.

One work item per (row, page): scores, local softmax sums and weighted latents of that page alone; items of a row
are merged by online softmax in page order. Nothing is padded to the longest neighbour, so a row's bits depend on
its own past only. Latents are [normalised c | shared p]; there is no positional encoding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels.linear import MIN_COLUMNS, ROW_TILE, pad_rows

PAGE = 64
"""Tokens per page; page j of a sequence holds its absolute positions 64 j .. 64 j + 63."""


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Work items of one batch, the same for every MLA layer. Items are ordered by page index, then by row.

    rows[I]      row of each item
    pages[I]     page id of each item
    hidden[I,64] True where the token does not exist (for the row), or None if no item has such a token
    starts       first item of each page index, then the number of items
    """

    rows: Tensor
    pages: Tensor
    hidden: Tensor | None
    starts: tuple[int, ...]
    num_rows: int


def plan_pages(page_table: Tensor, lengths: Tensor) -> PagePlan:
    """Items for page_table[R, M] int64 (page ids; entries past a row's last page are ignored) and lengths[R] int64
    >= 0, the number of tokens each row attends to, itself included. A row of length 0 (padding) attends to nothing
    and gets zeros. InputError if a length needs more pages than the table is wide.
    """
    num_rows, width = page_table.shape
    counts = (lengths + (PAGE - 1)) // PAGE
    longest = int(counts.max()) if num_rows else 0
    if longest > width:
        raise InputError(f"a row attends to {longest} pages but the page table holds {width}", field="page_table")
    exists = torch.arange(longest).unsqueeze(1) < counts
    index, rows = exists.nonzero(as_tuple=True)
    starts = (0, *torch.cumsum(exists.sum(1), 0).tolist())
    valid = (lengths[rows] - index * PAGE).unsqueeze(1)
    hidden = torch.arange(PAGE) >= valid
    return PagePlan(
        rows=rows, pages=page_table[rows, index], hidden=hidden, starts=tuple(starts), num_rows=num_rows
    )


def absorbed(
    q_lat: Tensor,
    q_pe: Tensor,
    pages: Tensor,
    page_table: Tensor | None,
    lengths: Tensor | None,
    scale: float,
    *,
    plan: PagePlan | None = None,
) -> Tensor:
    """o_lat[R, H, r] = Σ_τ softmax_τ(scale · (q_lat·c_τ + q_pe·p_τ)) c_τ, fp32.

    q_lat[R, H, r], q_pe[R, H, p]; pages[P, 64, r + p] in the model's dtype, finite everywhere (stale tails included);
    page_table and lengths as in `plan_pages`, or the `plan` made from them. A row must find its own latent in the
    pages already. Scores, softmax and sums in fp32. Row-invariant. Mutates nothing.
    """
    if plan is None:
        if page_table is None or lengths is None:
            raise InputError("absorbed needs page_table and lengths, or a plan", field="plan")
        plan = plan_pages(page_table, lengths)
    num_rows, heads, latent = q_lat.shape
    out = torch.zeros((num_rows, heads, latent), dtype=torch.float32)
    if not plan.starts[-1]:
        return out
    q = torch.cat([q_lat.float(), q_pe.float()], dim=-1).mul_(scale)
    keys = pages.index_select(0, plan.pages).float()
    if odd := -q.shape[-1] % ROW_TILE:
        # Inner widths that are no multiple of 4 take batch-dependent kernels; zeros add nothing to a score.
        q, keys = F.pad(q, (0, odd)), F.pad(keys, (0, odd))
    scores = torch.bmm(q.index_select(0, plan.rows), keys.transpose(1, 2))
    if plan.hidden is not None:
        scores.masked_fill_(plan.hidden.unsqueeze(1), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    part = torch.bmm(weights, keys)[..., :latent]
    return _merge(part, top, total, plan, out)


def _merge(part: Tensor, top: Tensor, total: Tensor, plan: PagePlan, out: Tensor) -> Tensor:
    """Online softmax over page index, rows that have that page only; fills and returns `out`."""
    first = plan.starts[1]
    if plan.starts[-1] == first:
        out[plan.rows] = part / total
        return out
    best = torch.zeros((plan.num_rows, *top.shape[1:]))
    norm = torch.ones_like(best)
    rows = plan.rows[:first]
    out[rows], best[rows], norm[rows] = part[:first], top[:first], total[:first]
    for begin, end in zip(plan.starts[1:], plan.starts[2:], strict=False):
        rows = plan.rows[begin:end]
        old, new = best[rows], top[begin:end]
        high = torch.maximum(old, new)
        keep, take = (old - high).exp_(), (new - high).exp_()
        out[rows] = out[rows].mul_(keep).add_(part[begin:end] * take)
        norm[rows] = norm[rows].mul_(keep).add_(total[begin:end] * take)
        best[rows] = high
    return out.div_(norm)


def head_matmul(x: Tensor, w: Tensor) -> Tensor:
    """Per-head products x[R, H, a] · w[H, a, b] -> [R, H, b] contiguous, in x's dtype.

    Rows are padded to a multiple of 16 and b to 16 inside, so it is row-invariant. w must be contiguous.
    """
    rows, columns = x.shape[0], w.shape[-1]
    if columns < MIN_COLUMNS:
        w = F.pad(w, (0, MIN_COLUMNS - columns))
    y = torch.bmm(pad_rows(x).transpose(0, 1).contiguous(), w)
    return y[:, :rows, :columns].transpose(0, 1).contiguous()
