"""KDA and the short convolution over segments worked on apart: the same as one pass."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck

from tidemill.core.errors import InputError
from tidemill.kernels import conv, kda

LENGTH = 45
SPLITS = {1: (45,), 2: (20, 25), 3: (16, 2, 27), 7: (1, 16, 3, 2, 17, 5, 1)}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(6)


def inputs(dtype: torch.dtype, bound: float | None) -> list[Tensor]:
    q, k = kda.qk_norm(torch.randn(2, LENGTH, 2, 8), torch.randn(2, LENGTH, 2, 8))
    g = (bound or -40.0) * torch.sigmoid(3.0 * torch.randn(2, LENGTH, 2, 8) - 2.0)
    found = (q, k, torch.randn(2, LENGTH, 2, 6), g, torch.rand(2, LENGTH, 2))
    return [x.to(dtype) for x in found]


def in_segments(args: list[Tensor], sizes: tuple[int, ...], state: Tensor,
                bound: float | None) -> tuple[Tensor, Tensor]:
    parts = zip(*(x.split(sizes, dim=1) for x in args), strict=True)
    segments = [kda.segment(*part, lower_bound=bound) for part in parts]
    states = kda.compose([s.transition for s in segments], state)
    return torch.cat([s.outputs(S) for s, S in zip(segments, states[:-1], strict=True)], 1), states[-1]


@pytest.mark.parametrize("bound", [-5.0, None])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("count", SPLITS)
def test_segments_equal_one_pass(count: int, dtype: torch.dtype, tolerance: float, bound: float | None) -> None:
    args, state = inputs(dtype, bound), torch.randn(2, 2, 8, 6, dtype=dtype)
    got = in_segments(args, SPLITS[count], state, bound)
    for a, b in zip(got, kda.chunk(*args, state, lower_bound=bound), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance)


def test_gradients_cross_the_borders() -> None:
    leaves = [x.requires_grad_() for x in inputs(torch.float64, -5.0)]
    state = torch.randn(2, 2, 8, 6, dtype=torch.float64, requires_grad=True)
    weights = [torch.randn(2, LENGTH, 2, 6, dtype=torch.float64), torch.randn_like(state)]
    want = torch.autograd.grad(kda.chunk(*leaves, state), [*leaves, state], weights)
    got = torch.autograd.grad(in_segments(leaves, SPLITS[7], state, -5.0), [*leaves, state], weights)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def test_composition_is_associative_and_keeps_its_order() -> None:
    parts = zip(*(x.split((16, 9, 20), dim=1) for x in inputs(torch.float64, -5.0)), strict=True)
    a, b, c = (kda.segment(*part).transition for part in parts)
    left, right = a.then(b).then(c), a.then(b.then(c))
    torch.testing.assert_close(left.phi, right.phi, rtol=0, atol=1e-13)
    torch.testing.assert_close(left.own, right.own, rtol=0, atol=1e-13)
    state = torch.randn(2, 2, 8, 6, dtype=torch.float64)
    torch.testing.assert_close(left(state), c(b(a(state))), rtol=0, atol=1e-13)
    assert not torch.allclose(left(state), a(b(c(state))))
    with pytest.raises(InputError, match="transition 1"):
        kda.compose([a, kda.Transition(b.phi[:1], b.own[:1])], state)


@pytest.mark.parametrize("count", SPLITS)
def test_convolution_segments_need_three_tokens_of_the_past(count: int) -> None:
    x, w = torch.randn(2, LENGTH, 4, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)
    before: Tensor | None = None
    parts = []
    for part in x.split(SPLITS[count], dim=1):
        parts.append(conv.short_conv_train(part, w, before))
        before = conv.halo(part, before)
    torch.testing.assert_close(torch.cat(parts, 1), conv.short_conv_train(x, w), rtol=0, atol=1e-14)


def test_segments_pass_gradcheck() -> None:
    args = tuple(x[:1, :18, :, :4].contiguous().requires_grad_() for x in inputs(torch.float64, -5.0)[:4])
    beta = torch.rand(1, 18, 2, dtype=torch.float64, requires_grad=True)

    def run(*x: Tensor) -> tuple[Tensor, ...]:
        s = kda.segment(*x)
        return s.own, s.reads, s.transition.phi, s.transition.own

    assert gradcheck(run, (*args, beta), fast_mode=True)
