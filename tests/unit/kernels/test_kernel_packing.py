"""Documents packed into one row: every training kernel gives what the documents give alone, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks

from tidemill.core.errors import InputError
from tidemill.kernels import conv, kda, mla
from tidemill.kernels.packing import cut, document_bounds

Kernel = Callable[..., Tensor]
LENGTHS = (5, 1, 40, 16, 16, 3, 33)
HEADS, KEY, VALUE = 2, 4, 3


def row(lengths: Sequence[int], dtype: torch.dtype = torch.float64) -> tuple[dict[str, list[Tensor]], Tensor]:
    """Inputs of each kernel for one packed row, and cu_seqlens."""
    torch.manual_seed(len(lengths))
    total = sum(lengths)

    def r(*shape: int) -> Tensor:
        return torch.randn(1, total, *shape, dtype=dtype)

    q, k = (torch.nn.functional.normalize(r(HEADS, KEY), dim=-1) for _ in range(2))
    inputs = {
        "conv": [r(6)],
        "kda": [q, k, r(HEADS, VALUE), -5.0 * torch.sigmoid(r(HEADS, KEY)), torch.sigmoid(r(HEADS))],
        "kda unbounded": [q, k, r(HEADS, VALUE), -9.0 * r(HEADS, KEY).square(), torch.sigmoid(r(HEADS))],
        "mla": [r(HEADS, KEY + 2), r(HEADS, KEY), r(2), r(HEADS, VALUE)],
    }
    return inputs, torch.tensor([0, *lengths]).cumsum(0)


KERNELS: dict[str, Kernel] = {
    "conv": lambda x, **kw: conv.short_conv_train(x, torch.linspace(-1, 1, 24, dtype=x.dtype).view(6, 4), **kw),
    "kda": lambda *x, **kw: kda.chunk(*x, **kw)[0],
    "kda unbounded": lambda *x, **kw: kda.chunk(*x, lower_bound=None, **kw)[0],
    "mla": lambda *x, **kw: mla.expanded(*x, 0.4, **kw),
}


def outputs_and_gradients(kernel: Kernel, inputs: list[Tensor], weight: Tensor, **kw: Tensor) -> list[Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = kernel(*leaves, **kw)
    return [out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)]


@pytest.mark.parametrize("name", KERNELS)
def test_packed_documents_equal_documents_alone(name: str) -> None:
    every, cu_seqlens = row(LENGTHS)
    inputs, kernel = every[name], KERNELS[name]
    weight = torch.randn_like(kernel(*inputs, cu_seqlens=cu_seqlens))
    packed = outputs_and_gradients(kernel, inputs, weight, cu_seqlens=cu_seqlens)
    for begin, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True):
        alone = outputs_and_gradients(kernel, [x[:, begin:end] for x in inputs], weight[:, begin:end])
        for a, b in zip(packed, alone, strict=True):
            torch.testing.assert_close(a[:, begin:end], b, rtol=1e-10, atol=1e-12)


def test_each_document_has_a_state_of_its_own() -> None:
    every, cu_seqlens = row(LENGTHS)
    start = torch.randn(len(LENGTHS), HEADS, KEY, VALUE, dtype=torch.float64)
    _, end = kda.chunk(*every["kda"], start, cu_seqlens=cu_seqlens)
    for n, (a, b) in enumerate(zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist(), strict=True)):
        _, want = kda.chunk(*(x[:, a:b] for x in every["kda"]), start[n : n + 1])
        torch.testing.assert_close(end[n : n + 1], want, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_of_packed_rows(name: str) -> None:
    every, cu_seqlens = row((3, 1, 18))
    inputs = tuple(x.requires_grad_() for x in every[name])
    assert gradcheck(lambda *x: KERNELS[name](*x, cu_seqlens=cu_seqlens), inputs, fast_mode=True)


def test_long_attention_equals_one_softmax_and_keeps_no_scores() -> None:
    torch.manual_seed(0)
    length = 2 * mla.QUERIES + 37
    q, k, v = torch.randn(2, length, 2, 6), torch.randn(2, length, 2, 4), torch.randn(2, length, 2, 3)
    pe = torch.randn(2, length, 2)
    leaves = [x.requires_grad_() for x in (q, k, pe, v)]
    scores = torch.einsum("bthd,bshd->bhts", q, torch.cat([k, pe[:, :, None].expand(-1, -1, 2, -1)], -1)) * 0.3
    want = torch.einsum("bhts,bshv->bthv", (scores + torch.full((length, length), -torch.inf).triu(1)).softmax(-1), v)
    weight = torch.randn_like(want)
    want_grads = torch.autograd.grad((want * weight).sum(), leaves)
    kept: list[int] = []
    with saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        got = mla.expanded(q, k, pe, v, 0.3)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(torch.autograd.grad((got * weight).sum(), leaves), want_grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert sum(kept) == sum(x.numel() for x in leaves) + 2 * 2 * length


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 17))
def test_blocks_hold_every_token_once_in_order(lengths: list[int], size: int) -> None:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    blocks = cut(bounds, size)
    places = blocks.tokens.flatten()
    real = torch.ones(places.numel(), dtype=torch.bool)
    real[blocks.spare] = False
    assert sorted(places[real].tolist()) == list(range(sum(lengths)))
    seen: dict[int, list[int]] = {}
    for s, count in enumerate(blocks.counts):
        for rank in range(count):
            block = blocks.starts[s] + rank
            tokens = [int(t) for t, ok in zip(blocks.tokens[block], real.view(-1, size)[block], strict=True) if ok]
            seen.setdefault(int(blocks.order[rank]), []).extend(tokens)
    for document, length in enumerate(lengths):
        assert seen[document] == list(range(int(bounds[document]), int(bounds[document]) + length))


@pytest.mark.parametrize(("cu_seqlens", "batch", "message"), [
    ([0, 4, 9], 2, "a batch of 2"), ([0, 4], 1, "rising from 0 to 9"), ([1, 9], 1, "rising"),
    ([0, 4, 4, 9], 1, "empty documents"), ([0, 9.0], 1, "int64"), ([9], 1, "int64"),
])
def test_bounds_that_do_not_fit(cu_seqlens: list[float], batch: int, message: str) -> None:
    with pytest.raises(InputError, match=message) as e:
        document_bounds(batch, 9, torch.tensor(cu_seqlens))
    assert e.value.field == "cu_seqlens"
