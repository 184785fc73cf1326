"""Absorbed paged attention against the expanded form, and the bookkeeping of pages."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck

from tidemill.core.errors import InputError
from tidemill.kernels import mla


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


@pytest.mark.parametrize("length", [1, 63, 64, 65, 150])
def test_absorbed_equals_expanded(length: int) -> None:
    heads, nope, pe, vdim, latent = 3, 16, 8, 24, 32
    q = torch.randn(1, length, heads, nope + pe)
    c, k_pe = torch.randn(1, length, latent), torch.randn(1, length, pe)
    w_uk, w_uv = torch.randn(heads, nope, latent) * 0.2, torch.randn(heads, latent, vdim) * 0.2
    scale = (nope + pe) ** -0.5
    k_nope = torch.einsum("btr,hnr->bthn", c, w_uk)
    v = torch.einsum("btr,hrv->bthv", c, w_uv)
    want = mla.expanded(q, k_nope, k_pe, v, scale)[0]

    num_pages = -(-length // mla.PAGE)
    pages = torch.full((num_pages + 2, mla.PAGE, latent + pe), 7.7)
    table = torch.randperm(num_pages + 2)[:num_pages]
    for t in range(length):
        pages[table[t // mla.PAGE], t % mla.PAGE] = torch.cat([c[0, t], k_pe[0, t]])
    q_lat = mla.head_matmul(q[0, :, :, :nope].contiguous(), w_uk)
    o_lat = mla.absorbed(
        q_lat, q[0, :, :, nope:], pages, table.expand(length, -1), torch.arange(1, length + 1), scale
    )
    torch.testing.assert_close(mla.head_matmul(o_lat, w_uv), want, rtol=1e-4, atol=1e-5)


def test_rows_of_length_zero_give_zeros() -> None:
    pages = torch.randn(2, mla.PAGE, 24)
    lengths = torch.tensor([0, 3, 0])
    out = mla.absorbed(torch.randn(3, 2, 16), torch.randn(3, 2, 8), pages, torch.zeros(3, 1).long(), lengths, 1.0)
    assert not out[[0, 2]].any()
    assert out[1].any()
    nothing = mla.absorbed(
        torch.randn(3, 2, 16), torch.randn(3, 2, 8), pages, torch.zeros(3, 1).long(), torch.zeros(3).long(), 1.0
    )
    assert not nothing.any()


def test_plan_orders_items_by_page_then_row() -> None:
    table = torch.tensor([[4, 5, 6], [7, 8, 9], [1, 0, 0]])
    plan = mla.plan_pages(table, torch.tensor([65, 192, 10]))
    assert plan.starts == (0, 3, 5, 6)
    assert plan.rows.tolist() == [0, 1, 2, 0, 1, 1]
    assert plan.pages.tolist() == [4, 7, 1, 5, 8, 9]
    assert plan.hidden is not None
    assert (~plan.hidden).sum(1).tolist() == [64, 64, 10, 1, 64, 64]
    with pytest.raises(InputError, match="page table holds 1"):
        mla.plan_pages(table[:, :1], torch.tensor([65, 1, 1]))
    with pytest.raises(InputError, match="plan"):
        mla.absorbed(torch.randn(3, 2, 16), torch.randn(3, 2, 8), torch.randn(2, 64, 24), None, None, 1.0)


def test_expanded_is_causal_and_differentiable() -> None:
    q, k, p, v = torch.randn(2, 9, 2, 12), torch.randn(2, 9, 2, 8), torch.randn(2, 9, 4), torch.randn(2, 9, 2, 6)
    before = mla.expanded(q, k, p, v, 0.3)
    for x in (q, k, p, v):
        x[:, 5:] = 100.0
    assert torch.equal(mla.expanded(q, k, p, v, 0.3)[:, :5], before[:, :5])
    shapes = ((1, 4, 2, 6), (1, 4, 2, 4), (1, 4, 2), (1, 4, 2, 3))
    args = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    assert gradcheck(lambda *a: mla.expanded(*a, 0.3), args)
