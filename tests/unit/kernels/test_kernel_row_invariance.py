"""The promise of every engine kernel: a row has the same bits alone and among others.

Plain random data hide changes of summation order behind rounding, so products get rows [x, -x] against weights [w, w]:
the exact result is zero and what is left is the order of the sum.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tidemill.kernels import attn_res, conv, kda, linear, lora, mla, moe, norm, pointwise, sampling, situ

ROWS = 257
BATCHES = (1, 7, 8, 64, 257)
PROBES = (0, 3, 6, 40, 63, 200, 256)


@pytest.fixture
def gen() -> torch.Generator:
    return torch.Generator().manual_seed(7)


def rand(gen: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=gen)


def cancelling(gen: torch.Generator, *shape: int, sign: float) -> Tensor:
    """[x, sign·x] along the last axis; an odd last column is tiny for rows (sign −1), ordinary for weights."""
    half = shape[-1] // 2
    x = rand(gen, *shape[:-1], half)
    parts = [x, sign * x]
    if shape[-1] % 2:
        parts.append(rand(gen, *shape[:-1], 1) * (1e-7 if sign < 0 else 1.0))
    return torch.cat(parts, dim=-1)


def as_tuple(y: object) -> tuple[Tensor, ...]:
    return y if isinstance(y, tuple) else (y,)  # type: ignore[return-value]


def assert_invariant(f: Callable[..., object], *rows: Tensor) -> None:
    """f maps tensors of n rows to tensors of n rows; compare probed rows in many batches with the row alone."""
    alone = {i: as_tuple(f(*(r[i : i + 1] for r in rows))) for i in PROBES}
    for size in BATCHES:
        for start in (0, 1, 5):
            got = as_tuple(f(*(r[start : start + size] for r in rows)))
            for i in PROBES:
                if start <= i < min(start + size, ROWS):
                    for y, want in zip(got, alone[i], strict=True):
                        a, b = (x.reshape(-1).view(torch.uint8) for x in (y[i - start], want[0]))
                        assert torch.equal(a, b), f"row {i} differs in a batch of {size} from row {start}"


@pytest.mark.parametrize(
    ("k", "n"), [(64, 64), (64, 2), (33, 5), (33, 8), (100, 200), (7, 3), (129, 31), (65, 1), (512, 9)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_linear(gen: torch.Generator, k: int, n: int, dtype: torch.dtype) -> None:
    order = torch.randperm(k, generator=gen)
    x = cancelling(gen, ROWS, k, sign=-1.0)[:, order].to(dtype)
    w = cancelling(gen, n, k, sign=1.0)[:, order].to(dtype)
    assert_invariant(lambda x: linear.linear(x, w), x)


def test_the_unpadded_product_is_not_invariant(gen: torch.Generator) -> None:
    """The data can tell: without padding the same check fails. If it ever passes, the other tests prove nothing."""
    x, w = cancelling(gen, ROWS, 64, sign=-1.0), cancelling(gen, 64, 64, sign=1.0)
    with pytest.raises(AssertionError, match="differs"):
        assert_invariant(lambda x: torch.nn.functional.linear(x, w), x)


@pytest.mark.parametrize("k", [33, 64])
def test_fused_columns_keep_the_bits_of_single_maps(gen: torch.Generator, k: int) -> None:
    x, a, b = cancelling(gen, 37, k, sign=-1.0), cancelling(gen, 2, k, sign=1.0), cancelling(gen, 70, k, sign=1.0)
    assert torch.equal(linear.linear(x, torch.cat([a, b]))[:, :2], linear.linear(x, a))


@pytest.mark.parametrize("d", [2, 31, 64, 129])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elementwise_and_norms(gen: torch.Generator, d: int, dtype: torch.dtype) -> None:
    x, y, w = rand(gen, ROWS, d).to(dtype), rand(gen, ROWS, d).to(dtype), rand(gen, d)
    for f in (pointwise.sigmoid, pointwise.silu, pointwise.softplus, norm.l2_norm):
        assert_invariant(f, x)
    assert_invariant(lambda x: norm.rms_norm(x, w, 1e-5), x)
    assert_invariant(lambda x, y: norm.gated_rms_norm(x, w, y, 1e-5), x, y)
    assert_invariant(lambda x, y: situ.situ_glu(x, y, 4.0, 25.0), x, y)
    taps = rand(gen, d, 4)
    assert_invariant(lambda t: conv.short_conv(t, taps), rand(gen, ROWS, 4, d).to(dtype))


@pytest.mark.parametrize("m", [1, 2, 3, 9])
@pytest.mark.parametrize("d", [31, 64])
def test_attention_residual_mixture(gen: torch.Generator, m: int, d: int) -> None:
    v, query = rand(gen, ROWS, m, d), rand(gen, d)
    v[:, m // 2] = -v[:, 0]
    assert_invariant(lambda v: attn_res.mix(v, query, 1e-5), v)


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (2, 32), (3, 17), (5, 64)])
def test_kda_gate_and_step(gen: torch.Generator, heads: int, dim: int) -> None:
    a_log, bias = rand(gen, heads + 3), rand(gen, heads * dim)
    z = rand(gen, ROWS, heads, dim)
    assert_invariant(lambda z: kda.gate(z, a_log, bias, -5.0), z)
    assert_invariant(lambda z: kda.gate(z, a_log, bias, None), z)
    state, g = rand(gen, ROWS, heads, dim, dim), -rand(gen, ROWS, heads, dim).abs()
    half = dim // 2
    state[:, :, half : 2 * half] = state[:, :, :half]
    g[..., half : 2 * half] = g[..., :half]
    k = cancelling(gen, ROWS, heads, dim, sign=-1.0)
    v, beta = rand(gen, ROWS, heads, dim), torch.rand(ROWS, heads, generator=gen)

    def step(state: Tensor, *args: Tensor) -> tuple[Tensor, Tensor]:
        state = state.clone()
        return kda.step(state, *args), state

    assert_invariant(step, state, k, k, v, g, beta)


@pytest.mark.parametrize(("heads", "latent", "pe"), [(1, 17, 5), (2, 32, 16), (3, 33, 7), (4, 64, 32)])
def test_absorbed_attention(gen: torch.Generator, heads: int, latent: int, pe: int) -> None:
    pages = torch.cat([cancelling(gen, 40, mla.PAGE, n, sign=1.0) for n in (latent, pe)], dim=-1)
    q, p = cancelling(gen, ROWS, heads, latent, sign=-1.0), cancelling(gen, ROWS, heads, pe, sign=-1.0)
    table = torch.stack([torch.randperm(40, generator=gen)[:6] for _ in range(ROWS)])
    lengths = torch.randint(1, 6 * mla.PAGE, (ROWS,), generator=gen)
    lengths[3], lengths[6], lengths[40], lengths[200] = 64, 65, 1, 128
    assert_invariant(lambda q, p, t, n: mla.absorbed(q, p, pages, t, n, 0.2), q, p, table, lengths)


@pytest.mark.parametrize(("heads", "a", "b"), [(1, 17, 8), (2, 32, 16), (3, 33, 31)])
def test_head_matmul(gen: torch.Generator, heads: int, a: int, b: int) -> None:
    w = cancelling(gen, heads, b, a, sign=1.0).transpose(1, 2).contiguous()
    assert_invariant(lambda x: mla.head_matmul(x, w), cancelling(gen, ROWS, heads, a, sign=-1.0))


@pytest.mark.parametrize(
    ("experts", "k", "latent", "inner"), [(8, 2, 32, 32), (16, 4, 32, 64), (8, 2, 33, 17), (12, 3, 64, 96)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_routing_and_experts(
    gen: torch.Generator, experts: int, k: int, latent: int, inner: int, dtype: torch.dtype
) -> None:
    x, router, bias = cancelling(gen, ROWS, 64, sign=-1.0), cancelling(gen, experts, 64, sign=1.0), rand(gen, experts)
    assert_invariant(lambda x: moe.route(x, router, bias, k, True, 1.0), x)
    ids, weights = moe.route(rand(gen, ROWS, 64), rand(gen, experts, 64), 0.1 * bias, k, True, 1.0)
    z = cancelling(gen, ROWS, latent, sign=-1.0).to(dtype)
    w1, w3 = (cancelling(gen, experts, inner, latent, sign=1.0).to(dtype) for _ in range(2))
    w2 = rand(gen, experts, latent, inner).to(dtype)
    act = situ.GluAct(4.0, 25.0)
    factors = moe.ExpertLora(
        cancelling(gen, 5, latent, sign=1.0).to(dtype), rand(gen, experts, inner, 5).to(dtype),
        rand(gen, experts, inner, 5).to(dtype), rand(gen, experts, 5, inner).to(dtype),
        rand(gen, latent, 5).to(dtype), 2.0,
    )
    for adapter in (None, factors):
        assert_invariant(lambda z, i, w, a=adapter: moe.experts(z, i, w, w1, w3, w2, act, a), z, ids, weights)


def test_lora(gen: torch.Generator) -> None:
    a, b = cancelling(gen, 5, 33, sign=1.0), rand(gen, 40, 5)
    assert_invariant(lambda x: lora.delta(x, a, b, 0.5), cancelling(gen, ROWS, 33, sign=-1.0))


def test_sampling(gen: torch.Generator) -> None:
    temperature = torch.rand(ROWS, generator=gen)
    temperature[::3] = 0.0
    top_k = torch.randint(0, 5, (ROWS,), generator=gen)
    filters = (top_k, torch.rand(ROWS, generator=gen), torch.rand(ROWS, generator=gen) / 5)

    def draw(logits: Tensor, u: Tensor, t: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, ...]:
        got = sampling.sample(logits, u, t, top_k=top_k, top_p=top_p, min_p=min_p)
        return got.ids, got.logprobs, got.model_logprobs

    uniforms = torch.rand(ROWS, generator=gen, dtype=torch.float64)
    assert_invariant(draw, 3 * rand(gen, ROWS, 97), uniforms, temperature, *filters)
