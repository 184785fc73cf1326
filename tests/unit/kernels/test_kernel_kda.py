"""KDA: chunked form against the recurrence, extremes of the gate, causality by bits, gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tidemill.core.errors import InputError
from tidemill.kernels import kda

GATES = ("random", "all -5", "all 0", "0 or -5")


def inputs(gates: str, batch: int, length: int, heads: int, dim: int) -> list[Tensor]:
    q, k = kda.qk_norm(torch.randn(batch, length, heads, dim), torch.randn(batch, length, heads, dim))
    g = -5.0 * torch.sigmoid(2 * torch.randn(batch, length, heads, dim))
    if gates == "all -5":
        g = torch.full_like(g, -5.0)
    elif gates == "all 0":
        g = torch.zeros_like(g)
    elif gates == "0 or -5":
        g = -5.0 * (torch.rand_like(g) > 0.5)
    v, beta = torch.randn(batch, length, heads, dim), torch.rand(batch, length, heads)
    return [q, k, v, g, beta]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("dim", [16, 128])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_chunk_equals_recurrence(gates: str, dim: int, bound: float | None) -> None:
    args = inputs(gates, 2, 77, 3, dim)
    state = torch.randn(2, 3, dim, dim)
    want, want_state = kda.recurrence(*args, state)
    got, got_state = kda.chunk(*args, state, lower_bound=bound)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_state, want_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_any_length(length: int) -> None:
    args = inputs("random", 1, length, 2, 16)
    want, want_state = kda.recurrence(*args)
    got, got_state = kda.chunk(*args)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_state, want_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("split", [1, 16, 31])
def test_splits_carry_the_state(split: int) -> None:
    args = inputs("random", 2, 50, 2, 16)
    whole, whole_state = kda.recurrence(*args)
    head, state = kda.recurrence(*(x[:, :split] for x in args))
    tail, state = kda.recurrence(*(x[:, split:] for x in args), state)
    assert torch.equal(torch.cat([head, tail], 1), whole)
    assert torch.equal(state, whole_state)
    head, state = kda.chunk(*(x[:, :split] for x in args))
    tail, state = kda.chunk(*(x[:, split:] for x in args), state)
    torch.testing.assert_close(torch.cat([head, tail], 1), whole, rtol=0, atol=1e-5)
    torch.testing.assert_close(state, whole_state, rtol=0, atol=1e-5)


@pytest.mark.parametrize("position", [0, 5, 16, 20, 37])
@pytest.mark.parametrize("bound", [-5.0, None])
def test_later_tokens_do_not_touch_a_bit_of_earlier_outputs(position: int, bound: float | None) -> None:
    args = inputs("random", 2, 40, 2, 16)
    before, _ = kda.chunk(*args, lower_bound=bound)
    changed = [x.clone() for x in args]
    for x, other in zip(changed, inputs("0 or -5", 2, 40, 2, 16), strict=True):
        x[:, position + 1 :] = other[:, position + 1 :]
    after, _ = kda.chunk(*changed, lower_bound=bound)
    assert torch.equal(after[:, : position + 1], before[:, : position + 1])


def test_decay_to_nothing_stays_finite() -> None:
    state = torch.ones(1, 1, 16, 16)
    q, k, v, g, beta = inputs("all -5", 1, 1, 1, 16)
    for _ in range(300):
        out = kda.step(state, q[:, 0], k[:, 0], 0 * v[:, 0], g[:, 0], beta[:, 0])
    assert state.abs().max() < 1e-30
    assert out.isfinite().all()


@pytest.mark.parametrize("z", [-50.0, 50.0])
def test_gate_extremes(z: float) -> None:
    g = kda.gate(torch.full((1, 2, 4), z), torch.tensor([0.0, 1.0, 9.0]), torch.zeros(8), -5.0)
    assert g.isfinite().all()
    assert torch.all((g >= -5.0) & (g <= 0.0))
    torch.testing.assert_close(g, torch.full_like(g, -5.0 if z > 0 else 0.0), atol=1e-6, rtol=0)


def test_gate_is_per_head_and_ignores_padding() -> None:
    z, bias = torch.randn(3, 2, 4), torch.randn(8)
    a = torch.tensor([0.3, -0.7, 5.0, 5.0])
    want = -5.0 * torch.sigmoid(a[:2].exp()[:, None] * (z + bias.view(2, 4)))
    torch.testing.assert_close(kda.gate(z, a, bias, -5.0), want)
    torch.testing.assert_close(kda.gate_train(z, a, bias, -5.0), want)
    unbounded = -a[:2].exp()[:, None] * torch.nn.functional.softplus(z + bias.view(2, 4))
    torch.testing.assert_close(kda.gate(z, a, bias, None), unbounded)
    torch.testing.assert_close(kda.gate_train(z, a, bias, None), unbounded)


def test_step_reads_after_the_update() -> None:
    k = torch.zeros(1, 1, 16)
    k[..., 0] = 1.0
    state = torch.zeros(1, 1, 16, 16)
    v = torch.randn(1, 1, 16)
    out = kda.step(state, k, k, v, torch.zeros(1, 1, 16), torch.ones(1, 1))
    torch.testing.assert_close(out, v)
    torch.testing.assert_close(state[0, 0, 0], v[0, 0])


def test_gradients() -> None:
    args = [x.double().requires_grad_() for x in inputs("random", 1, 19, 2, 4)]
    state = torch.randn(1, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    assert gradcheck(lambda *a: kda.chunk(*a), (*args, state))
    assert gradcheck(lambda *a: kda.chunk(*a, lower_bound=None), (*args, state))
    z, a_log, bias = (torch.randn(n, dtype=torch.float64, requires_grad=True) for n in ((2, 3, 2, 4), (3,), (8,)))
    for bound in (-5.0, None):
        assert gradcheck(lambda *a, b=bound: kda.gate_train(*a, b), (z, a_log, bias))


@pytest.mark.parametrize("gates", GATES)
def test_gradients_are_finite_at_the_extremes(gates: str) -> None:
    args = [x.requires_grad_() for x in inputs(gates, 1, 40, 2, 32)]
    out, state = kda.chunk(*args)
    (out.square().sum() + state.sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in args)


def test_refusals() -> None:
    args = inputs("random", 1, 4, 1, 16)
    with pytest.raises(InputError, match="overflow"):
        kda.chunk(*args, chunk=64)
    with pytest.raises(InputError, match="contiguous float32"):
        kda.step(torch.zeros(1, 1, 16, 16).transpose(2, 3), *(x[:, 0] for x in args))
