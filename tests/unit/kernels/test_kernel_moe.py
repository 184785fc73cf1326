"""Routing, experts and quantile balancing against direct formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels import moe, situ

ACT = situ.GluAct(4.0, 25.0)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(9)


def by_loop(
    z: Tensor, ids: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, lora: moe.ExpertLora | None
) -> Tensor:
    out = torch.zeros_like(z)
    for row in range(z.shape[0]):
        for e, weight in zip(ids[row].tolist(), weights[row], strict=True):
            a, b, c = w1[e], w3[e], w2[e]
            if lora is not None:
                a = a + lora.scale * lora.b1[e] @ lora.a13
                b = b + lora.scale * lora.b3[e] @ lora.a13
                c = c + lora.scale * lora.b2 @ lora.a2[e]
            out[row] += weight * (c @ situ.situ_glu(a @ z[row], b @ z[row], 4.0, 25.0))
    return out


def test_bias_changes_the_selection_but_not_the_weights() -> None:
    x, router = torch.randn(50, 16), torch.randn(8, 16)
    scores = torch.sigmoid(x @ router.t())
    plain, _ = moe.route(x, router, torch.zeros(8), 2, True, 1.0)
    bias = torch.zeros(8)
    bias[3] = 10.0
    ids, weights = moe.route(x, router, bias, 2, True, 1.0)
    assert torch.all(ids[:, 0] == 3)
    assert not torch.equal(ids, plain)
    raw = scores.gather(1, ids)
    torch.testing.assert_close(weights, raw / raw.sum(-1, keepdim=True), rtol=1e-5, atol=1e-6)
    _, unnormalised = moe.route(x, router, bias, 2, False, 2.5)
    torch.testing.assert_close(unnormalised, 2.5 * raw, rtol=1e-5, atol=1e-6)
    ids_train, weights_train, scores_train = moe.route_train(x, router, bias, 2, True, 1.0)
    assert torch.equal(ids_train, ids)
    torch.testing.assert_close(weights_train, weights)
    torch.testing.assert_close(scores_train, scores)


def test_one_expert_keeps_its_raw_score() -> None:
    x, router = torch.randn(5, 16), torch.randn(4, 16)
    ids, weights = moe.route(x, router, torch.zeros(4), 1, True, 1.0)
    torch.testing.assert_close(weights, torch.sigmoid(x @ router.t()).gather(1, ids), rtol=1e-5, atol=1e-6)


def test_ties_go_to_the_lowest_index() -> None:
    ids, _ = moe.route(torch.zeros(3, 16), torch.randn(8, 16), torch.zeros(8), 3, True, 1.0)
    assert ids.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("with_lora", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_experts_equal_a_loop(with_lora: bool, rows: int) -> None:
    z, ids = torch.randn(rows, 20), torch.stack([torch.randperm(5)[:2] for _ in range(rows)])
    weights = torch.rand(rows, 2)
    w1, w3, w2 = torch.randn(5, 17, 20) * 0.3, torch.randn(5, 17, 20) * 0.3, torch.randn(5, 20, 17) * 0.3
    lora = None
    if with_lora:
        lora = moe.ExpertLora(torch.randn(3, 20), torch.randn(5, 17, 3), torch.randn(5, 17, 3), torch.randn(5, 3, 17),
                              torch.randn(20, 3), 0.1)
    want = by_loop(z, ids, weights, w1, w3, w2, lora)
    torch.testing.assert_close(moe.experts(z, ids, weights, w1, w3, w2, ACT, lora), want, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(moe.experts_train(z, ids, weights, w1, w3, w2, ACT, lora), want, rtol=1e-4, atol=1e-4)


def test_an_expert_that_gets_every_row() -> None:
    z, ids, weights = torch.randn(50, 16), torch.zeros(50, 1).long(), torch.ones(50, 1)
    w = [torch.randn(3, 16, 16) for _ in range(3)]
    want = by_loop(z, ids, weights, *w, None)
    torch.testing.assert_close(moe.experts(z, ids, weights, *w, ACT), want, rtol=1e-4, atol=1e-4)


class TestQuantileBalancing:
    def scores(self, m: int = 4000, experts: int = 16) -> Tensor:
        return torch.sigmoid(torch.randn(m, experts) + torch.linspace(-1, 1, experts))

    def exact(self, required: Tensor, k: int) -> Tensor:
        m, experts = required.shape
        rank = -(-m * k // experts)
        found = required.double().sort(dim=0).values[rank - 1]
        return found - found.mean()

    def test_histogram_is_the_exact_quantile_within_a_bin(self) -> None:
        scores, bias = self.scores(), torch.randn(16) * 0.1
        required = moe.required_bias(scores, bias, 4)
        histogram = moe.BiasHistogram.empty(bias).add(required)
        got = histogram.quantiles(4).double()
        assert (got - self.exact(required, 4)).abs().max() <= 2 * histogram.width
        assert abs(got.mean().item()) < 1e-6

    def test_counts_do_not_depend_on_sharding(self) -> None:
        scores, bias = self.scores(), torch.zeros(16)
        required = moe.required_bias(scores, bias, 4)
        whole = moe.BiasHistogram.empty(bias).add(required)
        parts = [moe.BiasHistogram.empty(bias).add(part) for part in required.split([1, 999, 2000, 1000])]
        merged = parts[3].merge(parts[0]).merge(parts[2].merge(parts[1]))
        assert torch.equal(merged.counts, whole.counts)
        assert torch.equal(merged.quantiles(4), whole.quantiles(4))

    def test_the_new_bias_balances_the_load(self) -> None:
        scores, bias = self.scores(), torch.zeros(16)
        for _ in range(6):
            required = moe.required_bias(scores, bias, 4)
            bias = moe.BiasHistogram.empty(bias).add(required).quantiles(4)
        load = torch.bincount((scores + bias).topk(4).indices.flatten(), minlength=16) / (4000 * 4 / 16)
        start = torch.bincount(scores.topk(4).indices.flatten(), minlength=16) / (4000 * 4 / 16)
        assert load.max() < 1.15 < start.max()

    def test_refusals(self) -> None:
        empty = moe.BiasHistogram.empty(torch.zeros(4))
        with pytest.raises(InputError, match="at least one token"):
            empty.quantiles(2)
        with pytest.raises(InputError, match="ranges"):
            empty.merge(moe.BiasHistogram.empty(torch.ones(4)))
        with pytest.raises(InputError, match="fewer than 4"):
            moe.required_bias(torch.rand(3, 4), torch.zeros(4), 4)
        with pytest.raises(InputError, match="num_bins"):
            moe.BiasHistogram.empty(torch.zeros(4), 0)
