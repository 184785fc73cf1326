"""Absorbed attention with the rows of a sequence taken in tiles, so that a prefill reads each page once per tile.

The arithmetic of `absorbed`, item by item: one work item per (tile, page), local softmax sums, online merge in page
order. A tile is the rows of one sequence whose positions share position // tile_tokens, where tile_tokens divides the
page: all its rows attend to the same pages, so no item is ever wholly masked. Rows of a tile times heads are padded
to a multiple of 16, hence the bits of a row do not depend on how many rows of its tile are present, nor on tile_tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels.linear import ROW_TILE, padded_rows
from tidemill.kernels.mla.absorbed import PAGE

_WIDE_TILE_ROWS = 32
"""Rows times heads aimed at in a prefill tile."""


@dataclass(frozen=True, slots=True)
class TilePlan:
    """Work items of one batch, the same for every MLA layer; ordered by page index, then by tile.

    tile_tokens  tokens per tile
    num_tiles
    row_tile[R], row_place[R]  where each row lies
    tiles[I], pages[I]         tile and page id of each item
    hidden[I, tile_tokens, 64] True where the key does not exist yet for that token of the tile
    starts       first item of each page index, then the number of items
    """

    tile_tokens: int
    num_tiles: int
    row_tile: Tensor
    row_place: Tensor
    tiles: Tensor
    pages: Tensor
    hidden: Tensor
    starts: tuple[int, ...]


def tokens_per_tile(heads: int, longest: int) -> int:
    """A power of two that divides the page: 1 if every sequence has one new row, else about 32 rows of heads."""
    if longest == 1:
        return 1
    tokens = 1
    while tokens * 2 * heads <= _WIDE_TILE_ROWS and tokens < PAGE:
        tokens *= 2
    return tokens


def plan_tiles(
    page_table: Tensor, starts: Tensor, counts: Tensor, row_sequence: Tensor, positions: Tensor, tile_tokens: int,
) -> TilePlan:
    """Tiles for B sequences with `counts`[B] >= 1 new rows from position `starts`[B] on.

    page_table[B, M] int64; row_sequence[R] (0..B-1) and positions[R] of each row. All int64. InputError if a position
    lies beyond the table or tile_tokens does not divide the page.
    """
    if PAGE % tile_tokens:
        raise InputError(f"tile_tokens = {tile_tokens}: expected a divisor of {PAGE}", field="tile_tokens")
    first = starts // tile_tokens
    per_sequence = (starts + counts - 1) // tile_tokens - first + 1
    ends = per_sequence.cumsum(0)
    num_tiles = int(ends[-1])
    tile_sequence = torch.repeat_interleave(torch.arange(len(starts)), per_sequence)
    tile_base = (torch.arange(num_tiles) - (ends - per_sequence - first)[tile_sequence]) * tile_tokens
    num_pages = tile_base // PAGE + 1
    longest = int(num_pages.max())
    if longest > page_table.shape[1]:
        raise InputError(f"a row attends to {longest} pages but the page table holds {page_table.shape[1]}",
                         field="page_table")
    exists = torch.arange(longest).unsqueeze(1) < num_pages
    index, tiles = exists.nonzero(as_tuple=True)
    seen = (tile_base[tiles] - index * PAGE).unsqueeze(1) + torch.arange(1, tile_tokens + 1)
    return TilePlan(
        tile_tokens=tile_tokens, num_tiles=num_tiles,
        row_tile=(ends - per_sequence - first)[row_sequence] + positions // tile_tokens,
        row_place=positions % tile_tokens, tiles=tiles, pages=page_table[tile_sequence[tiles], index],
        hidden=torch.arange(PAGE) >= seen.unsqueeze(-1), starts=(0, *exists.sum(1).cumsum(0).tolist()),
    )


def absorbed_tiles(q_lat: Tensor, q_pe: Tensor, pages: Tensor, scale: float, plan: TilePlan) -> Tensor:
    """o_lat[R, H, r] as `absorbed` defines it, fp32.

    q_lat[R, H, r], q_pe[R, H, p]; pages[P, 64, r + p] in the model's dtype, finite everywhere; a row must find its own
    latent in the pages already. Row-invariant. Mutates nothing.
    """
    heads, latent = q_lat.shape[1:]
    width = pages.shape[-1]
    inner = width + -width % ROW_TILE  # inner widths that are no multiple of 4 take batch-dependent kernels
    present = plan.tile_tokens * heads
    rows = padded_rows(present)
    q = torch.zeros((plan.num_tiles, rows, inner))
    tile = q[:, :present].unflatten(1, (plan.tile_tokens, heads))
    tile[plan.row_tile, plan.row_place] = F.pad(torch.cat([q_lat, q_pe], dim=-1).float().mul_(scale),
                                                (0, inner - width))
    keys = pages.index_select(0, plan.pages).float()
    if inner != width:
        keys = F.pad(keys, (0, inner - width))
    scores = torch.bmm(q.index_select(0, plan.tiles), keys.transpose(1, 2))
    scores[:, :present].unflatten(1, (plan.tile_tokens, heads)).masked_fill_(plan.hidden.unsqueeze(2), -torch.inf)
    top = scores.amax(-1, keepdim=True)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = _merge(torch.bmm(weights, keys), top, total, plan)
    return out[:, :present, :latent].unflatten(1, (plan.tile_tokens, heads))[plan.row_tile, plan.row_place]


def _merge(part: Tensor, top: Tensor, total: Tensor, plan: TilePlan) -> Tensor:
    """Online softmax over page index, tiles that have that page only: [tiles, rows, width]."""
    first = plan.starts[1]
    if plan.starts[-1] == first:
        return part.div_(total)
    out, best, norm = part[:first], top[:first], total[:first]  # every tile has page 0, in tile order
    for begin, end in zip(plan.starts[1:], plan.starts[2:], strict=False):
        tiles = plan.tiles[begin:end]
        old, new = best[tiles], top[begin:end]
        high = torch.maximum(old, new)
        keep, take = (old - high).exp_(), (new - high).exp_()
        out[tiles] = out[tiles].mul_(keep).add_(part[begin:end] * take)
        norm[tiles] = norm[tiles].mul_(keep).add_(total[begin:end] * take)
        best[tiles] = high
    return out.div_(norm)
