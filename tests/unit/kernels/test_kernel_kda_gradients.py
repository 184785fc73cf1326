"""KDA's written-out gradient: against autograd through the recurrence, at extremes of the gate, and what it keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tidemill.kernels import kda

GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "spread": lambda r: -5.0 * torch.sigmoid(3.0 * r),
    "all -5": lambda r: torch.full_like(r, -5.0),
    "all 0": torch.zeros_like,
    "0 or -5": lambda r: -5.0 * (r > 0),
}
UNBOUNDED: dict[str, Callable[[Tensor], Tensor]] = GATES | {
    "to -300": lambda r: -300.0 * r.square(), "0 or -100": lambda r: -100.0 * (r > 0),
}
CASES = [(name, -5.0) for name in GATES] + [(name, None) for name in UNBOUNDED]
LENGTH, PREFIX = 16 * 9 + 5, 16 * 8 + 3
"""More than one group of eight chunks, with a partial last chunk; and a prefix that ends inside a chunk."""


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(4)


def leaves(gates: str, *, dtype: torch.dtype = torch.float64, length: int = LENGTH) -> list[Tensor]:
    q, k = kda.qk_norm(torch.randn(2, length, 2, 8), torch.randn(2, length, 2, 8))
    g = UNBOUNDED[gates](torch.randn(2, length, 2, 8))
    found = [q, k, torch.randn(2, length, 2, 6), g, torch.rand(2, length, 2), torch.randn(2, 2, 8, 6)]
    return [x.to(dtype).requires_grad_() for x in found]


def by_recurrence(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """The recurrence as its formula stands, for autograd."""
    out = []
    for t in range(q.shape[1]):
        S = S * g[:, t, :, :, None].exp()
        missing = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], S)
        S = S + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * missing)
        out.append(torch.einsum("bhk,bhkv->bhv", q[:, t], S))
    return torch.stack(out, 1), S


@pytest.mark.parametrize(("gates", "bound"), CASES)
def test_gradients_equal_those_of_the_recurrence(gates: str, bound: float | None) -> None:
    args = leaves(gates)
    weights = [torch.randn(2, LENGTH, 2, 6, dtype=torch.float64), torch.randn(2, 2, 8, 6, dtype=torch.float64)]
    want_out = by_recurrence(*args)
    want = torch.autograd.grad(want_out, args, weights)
    got_out = kda.chunk(*args, lower_bound=bound)
    got = torch.autograd.grad(got_out, args, weights)
    for a, b in zip((*got_out, *got), (*want_out, *want), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)
    single = [x.detach().float().requires_grad_() for x in args]
    in_fp32 = torch.autograd.grad(kda.chunk(*single, lower_bound=bound), single, [w.float() for w in weights])
    for a, b in zip(in_fp32, want, strict=True):
        assert (a.double() - b).norm() <= 1e-5 * b.norm() + 1e-6


@pytest.mark.parametrize(("gates", "bound"), CASES)
def test_a_loss_on_a_prefix_leaves_later_tokens_without_gradient(gates: str, bound: float | None) -> None:
    args = leaves(gates, dtype=torch.float32)
    out, _ = kda.chunk(*args, lower_bound=bound)
    out[:, :PREFIX].square().sum().backward()
    for x in args[:5]:
        assert x.grad is not None
        assert x.grad[:, :PREFIX].any()
        assert not x.grad[:, PREFIX:].any()


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize("z", [-50.0, 50.0, "either"])
def test_finite_down_to_the_gates_parameters(z: float | str, bound: float | None) -> None:
    q, k, v, _, beta, _ = leaves("all 0", dtype=torch.float32)
    raw = 50.0 * torch.sign(torch.randn_like(k)) if isinstance(z, str) else torch.full_like(k, z)
    raw = raw.detach().requires_grad_()
    a_log, bias = (torch.zeros(n, requires_grad=True) for n in (2, 16))
    out, state = kda.chunk(q, k, v, kda.gate_train(raw, a_log, bias, bound), beta, lower_bound=bound)
    (out.square().sum() + state.square().sum()).backward()
    assert out.isfinite().all()
    for x in (q, k, v, beta, raw, a_log, bias):
        assert x.grad is not None
        assert x.grad.isfinite().all()


@pytest.mark.parametrize("bound", [-5.0, None])
def test_kept_for_backward_are_inputs_and_a_state_every_eighth_chunk(bound: float | None) -> None:
    args = leaves("spread", dtype=torch.float32)
    kept: list[int] = []
    with saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        kda.chunk(*args, lower_bound=bound)
    assert sum(kept) == sum(x.numel() for x in args[:5]) + 2 * args[5].numel()


def test_backward_can_run_twice() -> None:
    args = leaves("spread")
    out, state = kda.chunk(*args)
    loss = out.sum() + state.sum()
    first = torch.autograd.grad(loss, args, retain_graph=True)
    for a, b in zip(first, torch.autograd.grad(loss, args), strict=True):
        assert torch.equal(a, b)
