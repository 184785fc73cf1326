"""Forms that gather less: attention over tiles of rows, convolution tap by tap. Same results, and row-invariant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels.conv import short_conv, short_conv_rows
from tidemill.kernels.mla import absorbed, absorbed_tiles, plan_tiles, tokens_per_tile

STARTS = torch.tensor([0, 5, 63, 64, 130, 200])
COUNTS = torch.tensor([150, 1, 3, 64, 17, 1])


def rows_of(starts: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    sequence = torch.repeat_interleave(torch.arange(len(starts)), counts)
    positions = torch.cat([torch.arange(s, s + c) for s, c in zip(starts.tolist(), counts.tolist(), strict=True)])
    return sequence, positions


@pytest.mark.parametrize(("heads", "latent", "pe"), [(2, 32, 16), (3, 32, 8), (1, 16, 8), (5, 24, 4), (40, 64, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_agree_with_items_and_with_rows_alone(heads, latent, pe, dtype):
    generator = torch.Generator().manual_seed(heads)
    pages = torch.randn(24, 64, latent + pe, generator=generator).to(dtype)
    table = torch.randperm(24, generator=generator).view(6, 4)
    sequence, positions = rows_of(STARTS, COUNTS)
    q = torch.randn(len(positions), heads, latent, generator=generator).to(dtype)
    q_pe = torch.randn(len(positions), heads, pe, generator=generator).to(dtype)
    one = torch.ones(1, dtype=torch.int64)
    alone = torch.cat([
        absorbed_tiles(q[i : i + 1], q_pe[i : i + 1], pages, 0.2,
                       plan_tiles(table[sequence[i]].unsqueeze(0), positions[i : i + 1], one, one * 0,
                                  positions[i : i + 1], 1))
        for i in range(len(positions))])
    items = absorbed(q, q_pe, pages, table[sequence], positions + 1, 0.2)
    torch.testing.assert_close(alone, items, atol=5e-6, rtol=1e-5)
    for tile_tokens in (1, 2, tokens_per_tile(heads, 9), 64):
        plan = plan_tiles(table, STARTS, COUNTS, sequence, positions, tile_tokens)
        assert torch.equal(absorbed_tiles(q, q_pe, pages, 0.2, plan), alone)
    shuffled = torch.randperm(len(positions), generator=generator)
    plan = plan_tiles(table, STARTS, COUNTS, sequence[shuffled], positions[shuffled], 8)
    assert torch.equal(absorbed_tiles(q[shuffled], q_pe[shuffled], pages, 0.2, plan), alone[shuffled])


def test_stale_tails_and_foreign_pages_do_not_matter():
    pages = torch.randn(8, 64, 40)
    table = torch.arange(8).view(2, 4)
    starts, counts = torch.tensor([70, 0]), torch.tensor([3, 10])
    sequence, positions = rows_of(starts, counts)
    q, q_pe = torch.randn(13, 2, 32), torch.randn(13, 2, 8)
    plan = plan_tiles(table, starts, counts, sequence, positions, 16)
    before = absorbed_tiles(q, q_pe, pages, 0.3, plan)
    pages[1, 9:], pages[4, 10:], pages[2:4], pages[5:] = 7.7e3, -7.7e3, 1e4, 1e4
    assert torch.equal(absorbed_tiles(q, q_pe, pages, 0.3, plan), before)


def test_tile_plan_refuses_what_does_not_fit():
    starts, counts = torch.tensor([64]), torch.tensor([1])
    with pytest.raises(InputError, match="attends to 2 pages"):
        plan_tiles(torch.zeros(1, 1, dtype=torch.int64), starts, counts, torch.tensor([0]), starts, 1)
    with pytest.raises(InputError, match="tile_tokens = 3"):
        plan_tiles(torch.zeros(1, 2, dtype=torch.int64), starts, counts, torch.tensor([0]), starts, 3)


@pytest.mark.parametrize("heads", [1, 2, 3, 16, 96])
def test_tokens_per_tile_divides_the_page(heads):
    assert tokens_per_tile(heads, 1) == 1
    assert 64 % tokens_per_tile(heads, 50) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [3, 48, 192])
def test_convolution_by_rows_has_the_bits_of_gathered_taps(channels, dtype):
    known = torch.randn(90, channels).to(dtype)
    rows = torch.randint(0, 90, (57, 4))
    w = torch.randn(channels, 1, 4)
    whole = short_conv(known[rows], w)
    assert torch.equal(short_conv_rows(known, rows, w), whole)
    assert torch.equal(short_conv_rows(known, rows[5:6], w), whole[5:6])
