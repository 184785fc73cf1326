"""Each small op against its formula in fp64, its limits and its refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

from tidemill.core.errors import InputError
from tidemill.kernels import attn_res, conv, linear, lora, mxfp4, norm, pointwise, sampling, situ


def r64(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(11)


def test_linear_equals_the_product_and_pads_only_inside() -> None:
    for rows, k, n in ((1, 7, 3), (16, 32, 16), (33, 64, 100)):
        x, w = torch.randn(rows, k), torch.randn(n, k)
        y = linear.linear(x, w)
        assert y.shape == (rows, n)
        assert y.is_contiguous()
        torch.testing.assert_close(y, x @ w.t())
    assert linear.padded_rows(1) == 16
    assert linear.padded_rows(32) == 32
    assert linear.pad_rows(torch.ones(3, 2)).shape == (16, 2)


def test_pointwise_accuracy_and_limits() -> None:
    x = torch.cat([torch.linspace(-100, 100, 1001), torch.tensor([-math.inf, math.inf, 0.0])])
    xd = x.double()
    torch.testing.assert_close(pointwise.sigmoid(x).double(), torch.sigmoid(xd), rtol=1e-6, atol=1e-38)
    torch.testing.assert_close(pointwise.softplus(x).double(), torch.nn.functional.softplus(xd), rtol=1e-6, atol=1e-38)
    want = torch.nn.functional.silu(xd[:-3])
    torch.testing.assert_close(pointwise.silu(x[:-3]).double(), want, rtol=1e-6, atol=1e-36)


def test_rms_norm_casts_before_the_gain() -> None:
    x, w = torch.randn(5, 48).bfloat16(), torch.randn(48).bfloat16()
    xf = x.float()
    want = (xf * torch.rsqrt(xf.square().mean(-1, keepdim=True) + 1e-5)).bfloat16() * w
    assert torch.equal(norm.rms_norm(x, w, 1e-5), want)
    torch.testing.assert_close(norm.rms_norm_train(x, w, 1e-5), want)


def test_l2_norm_has_its_eps_on_the_sum() -> None:
    x = torch.full((1, 64), 1e-3)
    want = 1e-3 / math.sqrt(64 * 1e-6 + 1e-6)
    torch.testing.assert_close(norm.l2_norm(x), torch.full((1, 64), want))
    torch.testing.assert_close(norm.l2_norm_train(x, scale=0.5), torch.full((1, 64), 0.5 * want))


def test_gated_norm_formula() -> None:
    o, g, w = torch.randn(4, 3, 16), torch.randn(4, 3, 16), torch.randn(16)
    want = o.double() / (o.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * w * torch.sigmoid(g.double())
    torch.testing.assert_close(norm.gated_rms_norm(o, w, g, 1e-5).double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.gated_rms_norm_train(o, w, g, 1e-5).double(), want, rtol=1e-5, atol=1e-6)


def test_hand_written_gradients() -> None:
    assert gradcheck(lambda x, w: norm.rms_norm_train(x, w, 1e-5), (r64(3, 5), r64(5)))
    assert gradcheck(lambda x: norm.l2_norm_train(x, scale=0.3), (r64(3, 5),))
    assert gradcheck(lambda o, w, g: norm.gated_rms_norm_train(o, w, g, 1e-5), (r64(3, 5), r64(5), r64(3, 5)))
    assert gradcheck(conv.short_conv_train, (r64(2, 5, 3), r64(3, 4), r64(2, 3, 3)))
    for cap in (25.0, None):
        assert gradcheck(lambda g, u, cap=cap: situ.situ_glu_train(g, u, 4.0, cap), (r64(3, 5), r64(3, 5)))
    assert gradcheck(lambda q, *s: attn_res.mix_train(s, q, 1e-5), (r64(5), r64(2, 3, 5), r64(2, 3, 5), r64(2, 3, 5)))


def test_convolution_is_causal_with_the_last_tap_on_the_current_token() -> None:
    w = torch.tensor([[0.0, 0.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0]])
    x = torch.arange(1.0, 7.0).view(1, 6, 1).expand(1, 6, 2)
    y = conv.short_conv_train(x, w)
    silu = torch.nn.functional.silu
    torch.testing.assert_close(y[0, :, 0], silu(x[0, :, 0]))
    torch.testing.assert_close(y[0, :, 1], silu(torch.tensor([0.0, 0.0, 0.0, 1.0, 2.0, 3.0])))


def test_convolution_carries_its_state_and_equals_gathered_taps() -> None:
    x, w = torch.randn(2, 9, 5), torch.randn(5, 1, 4)
    whole = conv.short_conv_train(x, w)
    tail = conv.short_conv_train(x[:, 4:], w, state=x[:, 1:4])
    torch.testing.assert_close(whole[:, 4:], tail)
    padded = torch.nn.functional.pad(x, (0, 0, 3, 0))
    taps = torch.stack([padded[:, t : t + 4] for t in range(9)], dim=1).reshape(18, 4, 5)
    torch.testing.assert_close(conv.short_conv(taps, w).view(2, 9, 5), whole)


def test_situ_is_bounded_and_uses_the_raw_gate() -> None:
    big = torch.tensor([-1e30, -50.0, 50.0, 1e30])
    y = situ.situ_glu(big[:, None].expand(4, 4), big.expand(4, 4), 4.0, 25.0)
    assert y.abs().max() <= 100.0
    assert y.isfinite().all()
    g, u = torch.tensor([3.0]), torch.tensor([7.0])
    want = 4 * math.tanh(0.75) / (1 + math.exp(-3)) * 25 * math.tanh(7 / 25)
    assert situ.situ_glu(g, u, 4.0, 25.0).item() == pytest.approx(want, rel=1e-6)
    uncapped = 4 * math.tanh(0.75) / (1 + math.exp(-3)) * 7
    assert situ.situ_glu(g, u, 4.0, None).item() == pytest.approx(uncapped, rel=1e-6)
    torch.testing.assert_close(situ.situ_glu_train(big, big, 4.0, 25.0), situ.situ_glu(big, big, 4.0, 25.0))


def test_zero_query_mixes_to_the_mean_of_unnormalised_sources() -> None:
    v = torch.randn(6, 4, 10)
    torch.testing.assert_close(attn_res.mix(v, torch.zeros(10), 1e-5), v.mean(1))
    query = torch.randn(10)
    keys = v.double() / (v.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    want = ((keys @ query.double()).softmax(-1)[..., None] * v).sum(1)
    torch.testing.assert_close(attn_res.mix(v, query, 1e-5).double(), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(attn_res.mix_train(v.unbind(1), query, 1e-5).double(), want, rtol=1e-5, atol=1e-6)


def test_lora_padding_does_not_change_the_result() -> None:
    x, a, b = torch.randn(5, 20), torch.randn(3, 20), torch.randn(9, 3)
    torch.testing.assert_close(lora.delta(x, a, b, 2.0), 2.0 * x @ a.t() @ b.t(), rtol=1e-5, atol=1e-5)
    wide_a, wide_b = lora.pad_rank(a, b)
    assert wide_a.shape == (16, 20)
    assert torch.equal(lora.delta(x, wide_a, wide_b, 2.0), lora.delta(x, a, b, 2.0))


class TestMxfp4:
    def test_all_sixteen_codes_low_nibble_first(self) -> None:
        packed = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2], dtype=torch.uint8)
        got = mxfp4.decode(packed, torch.tensor([[128]], dtype=torch.uint8))
        half = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
        assert got[0, :16].tolist() == [2 * v for v in half] + [-2 * v for v in half]

    def test_scale_bytes(self) -> None:
        packed = torch.full((1, 16), 0x22, dtype=torch.uint8)
        for byte in (0, 1, 127, 200, 254):
            got = mxfp4.decode(packed, torch.tensor([[byte]], dtype=torch.uint8))
            assert got[0, 0].item() == math.ldexp(1.0, byte - 127)
        assert mxfp4.decode(packed, torch.tensor([[255]], dtype=torch.uint8)).isnan().all()

    def test_rounding_goes_to_the_even_code(self) -> None:
        ties = [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]
        w = torch.zeros(1, 32)
        w[0, :7], w[0, 7:14], w[0, 31] = torch.tensor(ties), -torch.tensor(ties), 6.0
        got = mxfp4.decode(*mxfp4.encode(w))
        want = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0]
        assert got[0, :7].tolist() == want
        assert got[0, 7:14].tolist() == [-v for v in want]

    def test_exponent_rule(self) -> None:
        for amax, byte in ((1.0, 125), (1.7499, 125), (1.75, 126), (1.99, 126), (2.0, 126), (6.0, 127), (7.0, 128)):
            w = torch.zeros(1, 32)
            w[0, 3] = amax
            assert mxfp4.encode(w)[1].item() == byte, amax

    def test_every_element_is_the_nearest_value(self) -> None:
        w = torch.randn(64, 96)
        packed, scale = mxfp4.encode(w)
        assert packed.shape == (64, 48)
        assert scale.shape == (64, 3)
        unit = torch.exp2(scale.double() - 127).repeat_interleave(32, dim=1)
        table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
        grid = torch.cat([-table, table])
        best = (w.double().unsqueeze(-1) - unit.unsqueeze(-1) * grid).abs().amin(-1)
        error = (w.double() - mxfp4.decode(packed, scale).double()).abs()
        torch.testing.assert_close(error, best, rtol=0, atol=0)

    def test_re_encoding_keeps_values(self) -> None:
        w = torch.randn(500, 64) * torch.exp2(torch.randint(-20, 20, (500, 1)).float())
        once = mxfp4.decode(*mxfp4.encode(w))
        assert torch.equal(mxfp4.decode(*mxfp4.encode(once)), once)

    def test_exact_in_bf16(self) -> None:
        packed, scale = mxfp4.encode(torch.randn(8, 64))
        assert torch.equal(mxfp4.decode(packed, scale, torch.bfloat16).float(), mxfp4.decode(packed, scale))

    def test_zero_blocks_and_refusals(self) -> None:
        packed, scale = mxfp4.encode(torch.zeros(2, 32))
        assert not packed.any()
        assert mxfp4.decode(packed, scale).eq(0).all()
        with pytest.raises(InputError, match="multiple of 32"):
            mxfp4.encode(torch.zeros(2, 33))
        with pytest.raises(InputError, match="NaN"):
            mxfp4.encode(torch.full((1, 32), math.nan))


class TestSampling:
    def test_philox_known_answers(self) -> None:
        zero, ones = np.zeros(1, np.uint64), np.full(1, 0xFFFFFFFFFFFFFFFF, np.uint64)
        assert [int(w[0]) for w in sampling.philox4x32(zero, zero, zero)] == [
            0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8,
        ]
        assert [int(w[0]) for w in sampling.philox4x32(ones, ones, ones)] == [
            0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD,
        ]

    def test_uniforms_depend_on_all_three_and_on_nothing_else(self) -> None:
        u = sampling.uniform([1, 1, 1, 2], [5, 5, 6, 5], [9, 10, 9, 9])
        assert len(set(u.tolist())) == 4
        assert sampling.uniform([2], [5], [9])[0] == u[3]
        many = sampling.uniform([3] * 4000, [0] * 4000, range(4000))
        assert 0.48 < many.mean() < 0.52
        assert many.min() >= 0.0
        assert many.max() < 1.0

    def test_frequencies_follow_the_tempered_distribution(self) -> None:
        logits = torch.tensor([1.0, 0.0, -1.0, 0.5]).expand(20_000, 4)
        u = torch.from_numpy(sampling.uniform([4] * 20_000, [0] * 20_000, range(20_000)))
        got = sampling.sample(logits, u, torch.full((20_000,), 0.5))
        share = torch.bincount(got.ids, minlength=4) / 20_000
        torch.testing.assert_close(share, (logits[0] / 0.5).softmax(-1), atol=0.012, rtol=0)
        torch.testing.assert_close(got.logprobs, (logits / 0.5).log_softmax(-1).gather(1, got.ids[:, None])[:, 0])
        torch.testing.assert_close(got.model_logprobs, logits.log_softmax(-1).gather(1, got.ids[:, None])[:, 0])

    def test_greedy_takes_the_lowest_id_on_ties(self) -> None:
        got = sampling.sample(torch.tensor([[0.0, 2.0, 2.0, 1.0]]), torch.tensor([0.9]).double(), torch.zeros(1))
        assert got.ids.item() == 1
        assert got.logprobs.item() == 0.0

    def test_filters_keep_what_they_should(self) -> None:
        logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().expand(400, 4)
        u = torch.linspace(0, 0.9999, 400).double()
        one = torch.ones(400)

        def kept(**filters: torch.Tensor) -> list[int]:
            got = sampling.sample(logits, u, one, **filters)
            return sorted(set(got.ids.tolist()))

        assert kept() == [0, 1, 2, 3]
        assert kept(top_k=torch.full((400,), 2)) == [0, 1]
        assert kept(top_p=0.65 * one) == [0, 1]
        assert kept(top_p=0.75 * one) == [0, 1, 2]
        assert kept(min_p=0.6 * one) == [0, 1]
        assert kept(top_k=torch.zeros(400, dtype=torch.int64), top_p=1e-9 * one) == [0]
        got = sampling.sample(logits, u, one, top_k=torch.full((400,), 2))
        torch.testing.assert_close(got.logprobs[0].exp(), torch.tensor(0.4 / 0.7))

    def test_masked_tokens_are_never_drawn(self) -> None:
        logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]]).expand(3, 5)
        got = sampling.sample(logits, torch.tensor([0.0, 0.5, 1 - 2**-53]).double(), torch.ones(3))
        assert got.ids.tolist() == [1, 3, 3]
