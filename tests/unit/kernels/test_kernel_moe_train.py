"""The experts' training form: values, every gradient, and memory that does not depend on the routing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from tidemill.core.errors import InputError
from tidemill.kernels import moe, mxfp8
from tidemill.kernels.moe.grouped import grouped_outer, grouped_product, plan_groups
from tidemill.kernels.situ import GluAct

SITU, SWIGLU = GluAct(4.0, 25.0), GluAct()
EXPERTS, LATENT, INNER = 6, 32, 24


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(5)


def routing(rows: int, k: int, *, uneven: bool = False) -> Tensor:
    """ids[rows, k]; uneven: the first choice of 9 rows in 10 is expert 0, and the last expert gets nothing."""
    scores = torch.rand(rows, EXPERTS)
    if uneven:
        scores[:, 0] = torch.where(torch.arange(rows) % 10 < 9, 2.0, -1.0)
        scores[:, -1] = -2.0
    return scores.topk(k, dim=1).indices


def stacks(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    up = (EXPERTS, INNER, LATENT)
    w1, w3 = (torch.randn(up, dtype=dtype) * 0.3 for _ in range(2))
    return w1, w3, torch.randn(EXPERTS, LATENT, INNER, dtype=dtype) * 0.3


def factors(rank: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    shapes = ((rank, LATENT), (EXPERTS, INNER, rank), (EXPERTS, INNER, rank), (EXPERTS, rank, INNER), (LATENT, rank))
    return tuple(torch.randn(s, dtype=dtype) * 0.2 for s in shapes)


@pytest.mark.parametrize("act", [SITU, SWIGLU], ids=["situ", "swiglu"])
@pytest.mark.parametrize("with_lora", [False, True])
def test_gradients_of_every_input(act: GluAct, with_lora: bool) -> None:
    ids = torch.tensor([[0, 2], [2, 0], [3, 2], [2, 3], [0, 3]])  # expert 1 gets nothing
    shapes = [(5, 4), (5, 2), (4, 3, 4), (4, 3, 4), (4, 4, 3)]
    if with_lora:
        shapes += [(2, 4), (4, 3, 2), (4, 3, 2), (4, 2, 3), (4, 2)]
    args = tuple(torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)

    def run(z: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, *low: Tensor) -> Tensor:
        return moe.experts_train(z, ids, weights, w1, w3, w2, act, moe.ExpertLora(*low, 2.0) if low else None)

    assert gradcheck(run, args)


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_give_the_gradients_of_the_fp64_run(dtype: torch.dtype, rank: int) -> None:
    """gradcheck runs in fp64, which takes one product per expert: the grouped ones are held against that. Ranks 1
    and 3 are no multiple of the alignment."""
    ids = routing(40, 3, uneven=True)
    given = [torch.randn(40, LATENT), torch.rand(40, 3), *stacks(), *factors(rank)]
    given = [x.to(dtype).float() for x in given]
    dout = torch.randn(40, LATENT).to(dtype).double()

    def run(kind: torch.dtype) -> list[Tensor]:
        exact = torch.promote_types(kind, torch.float32)
        leaves = [x.to(exact if i == 1 else kind).requires_grad_() for i, x in enumerate(given)]
        z, weights, w1, w3, w2, *low = leaves
        out = moe.experts_train(z, ids, weights, w1, w3, w2, SITU, moe.ExpertLora(*low, 0.5))
        return [out, *torch.autograd.grad(out, leaves, dout.to(kind))]

    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for got, want in zip(run(dtype), run(torch.float64), strict=True):
        assert (got.double() - want).norm() <= tolerance * want.norm()


@pytest.mark.parametrize("act", [SITU, SWIGLU], ids=["situ", "swiglu"])
@pytest.mark.parametrize("uneven", [False, True])
@pytest.mark.parametrize("with_lora", [False, True])
def test_equals_the_engines_form(act: GluAct, uneven: bool, with_lora: bool) -> None:
    z, ids, weights, w = torch.randn(50, LATENT), routing(50, 3, uneven=uneven), torch.rand(50, 3), stacks()
    lora = moe.ExpertLora(*factors(4), 0.5) if with_lora else None
    got, want = moe.experts_train(z, ids, weights, *w, act, lora), moe.experts(z, ids, weights, *w, act, lora)
    assert (got - want).norm() <= 1e-6 * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_lora", [False, True])
def test_mxfp8_rounds_the_inputs_and_passes_gradients_straight(dtype: torch.dtype, with_lora: bool) -> None:
    """Against autograd over one expert at a time, with x + (rounded x − x) cut out of the gradient."""
    rows, inner = 30, 64
    ids = routing(rows, 2, uneven=True)
    shapes = [(rows, LATENT), (rows, 2), (EXPERTS, inner, LATENT), (EXPERTS, inner, LATENT), (EXPERTS, LATENT, inner)]
    if with_lora:
        shapes += [(4, LATENT), (EXPERTS, inner, 4), (EXPERTS, inner, 4), (EXPERTS, 4, inner), (LATENT, 4)]
    given = [(torch.randn(s) * 0.4).to(dtype).float() for s in shapes]
    dout = torch.randn(rows, LATENT).to(dtype).float()

    def through(x: Tensor) -> Tensor:
        return x + (mxfp8.round_trip(x) - x).detach()

    def reference(z: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, *low: Tensor) -> Tensor:
        if low:
            a13, b1, b3, a2, b2 = low
            w1, w3, w2 = w1 + 0.5 * b1 @ a13, w3 + 0.5 * b3 @ a13, w2 + 0.5 * b2 @ a2
        z = through(z)
        h = [through(SITU.train(z @ w1[e].t(), z @ w3[e].t()).to(dtype).float()) for e in range(EXPERTS)]
        y = torch.stack([h[e] @ w2[e].t() for e in range(EXPERTS)], dim=1)
        return (y.gather(1, ids.unsqueeze(-1).expand(-1, -1, LATENT)) * weights.unsqueeze(-1)).sum(1)

    exact = [x.clone().requires_grad_() for x in given]
    want = reference(*exact)
    leaves = [x.to(torch.float32 if i == 1 else dtype).requires_grad_() for i, x in enumerate(given)]
    z, weights, w1, w3, w2, *low = leaves
    lora = moe.ExpertLora(*low, 0.5) if low else None
    got = moe.experts_train(z, ids, weights, w1, w3, w2, SITU, lora, mxfp8_inputs=True)
    plain = moe.experts_train(z, ids, weights, w1, w3, w2, SITU, lora)
    # A pre-activation that differs in its last bit may round to the neighbouring code: a few elements, 1/16 each.
    tolerance = 1e-3 if dtype is torch.float32 else 3e-2
    assert (got - want).norm() <= tolerance * want.norm()
    assert (plain - want).norm() >= (0.02 if dtype is torch.float32 else 0.0) * want.norm()
    wanted = torch.autograd.grad(want, exact, dout)
    for found, grad in zip(torch.autograd.grad(got, leaves, dout.to(dtype)), wanted, strict=True):
        assert (found - grad).norm() <= tolerance * grad.norm()


@pytest.mark.parametrize(("latent", "inner"), [(32, 24), (24, 32)])
def test_mxfp8_refuses_widths_that_do_not_fill_blocks(latent: int, inner: int) -> None:
    z, up = torch.randn(4, latent), torch.randn(EXPERTS, inner, latent)
    with pytest.raises(InputError, match="width = 24: expected a multiple of 32"):
        moe.experts_train(z, routing(4, 2), torch.rand(4, 2), up, up, up.transpose(1, 2), SITU, mxfp8_inputs=True)


def test_no_rows() -> None:
    z, weights = torch.zeros(0, LATENT, requires_grad=True), torch.zeros(0, 2, requires_grad=True)
    w = [x.requires_grad_() for x in stacks()]
    out = moe.experts_train(z, torch.zeros(0, 2, dtype=torch.int64), weights, *w, SITU)
    assert out.shape == (0, LATENT)
    grads = torch.autograd.grad(out.sum(), [z, weights, *w])
    assert [g.shape for g in grads] == [x.shape for x in (z, weights, *w)]
    assert not any(g.any() for g in grads)


def test_an_expert_without_rows_has_a_zero_gradient() -> None:
    w = [x.requires_grad_() for x in stacks()]
    out = moe.experts_train(torch.randn(20, LATENT), routing(20, 2, uneven=True), torch.rand(20, 2), *w, SITU)
    for grad in torch.autograd.grad(out.sum(), w):
        assert not grad[-1].any()
        assert grad[0].any()


def test_frozen_weights_get_no_gradient_but_pass_it_on() -> None:
    z, ids, weights, w = torch.randn(9, LATENT, requires_grad=True), routing(9, 2), torch.rand(9, 2), stacks()
    low = [x.requires_grad_() for x in factors(4)]
    moe.experts_train(z, ids, weights, *w, SITU, moe.ExpertLora(*low, 1.0)).sum().backward()
    assert all(x.grad is None for x in w)
    assert z.grad is not None
    assert all(x.grad is not None and x.grad.any() for x in low)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("widths", [(16, 8), (5, 7)])
def test_products_over_groups(dtype: torch.dtype, widths: tuple[int, int]) -> None:
    inner, columns = widths
    ids = routing(11, 2, uneven=True)
    groups = plan_groups(ids, EXPERTS)
    owner = ids.flatten()[groups.order]
    assert torch.equal(owner, owner.sort().values)
    x, w = torch.randn(22, inner).to(dtype), torch.randn(EXPERTS, inner, columns).to(dtype)
    want = torch.stack([row.double() @ w[e].double() for row, e in zip(x, owner, strict=True)])
    torch.testing.assert_close(grouped_product(x, w, groups).double(), want, rtol=1e-2, atol=2e-2)
    y = torch.randn(22, columns).to(dtype)
    outer = torch.einsum("pe,pm,pn->emn", torch.nn.functional.one_hot(owner, EXPERTS).double(), x.double(), y.double())
    torch.testing.assert_close(grouped_outer(x, y, groups).double(), outer, rtol=1e-2, atol=5e-2)


class _Largest(TorchDispatchMode):
    """The largest number of elements any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.elements = max(self.elements, x.numel())
        return out


def test_memory_does_not_depend_on_the_routing() -> None:
    rows, k = 200, 2
    sizes = []
    for uneven in (False, True):
        z, ids = torch.randn(rows, LATENT, requires_grad=True), routing(rows, k, uneven=uneven)
        w = [x.requires_grad_() for x in stacks()]
        weights = torch.rand(rows, k)
        kept: dict[int, int] = {}

        def pack(x: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[x.data_ptr()] = x.numel()
            return x

        with _Largest() as largest:
            with saved_tensors_hooks(pack, lambda x: x):
                out = moe.experts_train(z, ids, weights, *w, SITU)
            out.sum().backward()
        own = sum(kept.values()) - sum(x.numel() for x in w)
        assert own == rows * LATENT + rows * k + 2 * rows * k * INNER
        sizes.append(largest.elements)
    assert sizes[0] == sizes[1] == rows * k * LATENT
