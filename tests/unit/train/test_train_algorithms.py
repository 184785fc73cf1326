"""Each algorithm against a straightforward loop, and invariance under the cut into micro-batches."""

import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tidemill.core.errors import InputError
from tidemill.train.algorithms import (
    AGGREGATIONS,
    GroupFilter,
    PolicyLoss,
    aggregate,
    denominators,
    group_advantages,
    keep_group,
    kl_k1,
    kl_k2,
    kl_k3,
    policy_loss,
    soft_overlong_penalty,
    truncated_importance_weights,
)

rewards = st.lists(st.sampled_from([0.0, 0.25, 1.0, -1.0]), min_size=1, max_size=9)


@given(rewards)
def test_advantages_against_statistics(values: list[float]) -> None:
    r = torch.tensor(values)
    mean, n = statistics.fmean(values), len(values)
    std = statistics.stdev(values) if n > 1 else 0.0
    grpo = [(v - mean) / (std + 1e-6) if std > 0 else 0.0 for v in values]
    loo = [v - (sum(values) - v) / (n - 1) if n > 1 else 0.0 for v in values]
    torch.testing.assert_close(group_advantages("grpo", r), torch.tensor(grpo), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(group_advantages("rloo", r), torch.tensor(loo), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(group_advantages("dr_grpo", r), r - mean, rtol=1e-5, atol=1e-6)


def test_advantages_refuse_nan_and_unknown_names() -> None:
    with pytest.raises(InputError, match="finite"):
        group_advantages("grpo", torch.tensor([1.0, math.nan]))
    with pytest.raises(InputError, match="grpo, dr_grpo, rloo"):
        group_advantages("gae", torch.ones(2))


def reference_clip(lp: float, old: float, adv: float, lo: float, hi: float) -> float:
    ratio = math.exp(lp - old)
    return max(-ratio * adv, -min(max(ratio, 1 - lo), 1 + hi) * adv)


def batch(seed: int, b: int = 5, t: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    lp = -torch.rand(b, t, generator=g) * 3
    old = lp + torch.randn(b, t, generator=g) * 0.4
    adv = torch.randn(b, 1, generator=g).expand(b, t).contiguous()
    mask = (torch.rand(b, t, generator=g) > 0.4).float()
    return lp, old, adv, mask


@pytest.mark.parametrize("name", ["clip", "dual_clip"])
def test_losses_against_a_loop(name: str) -> None:
    lp, old, adv, mask = batch(0)
    old = old - 1.5  # large ratios, so that every branch is taken
    conf = PolicyLoss(name=name, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    got = policy_loss(lp, old, adv, mask, conf)
    for i in range(lp.shape[0]):
        for j in range(lp.shape[1]):
            want = reference_clip(lp[i, j].item(), old[i, j].item(), adv[i, j].item(), 0.2, 0.28) if mask[i, j] else 0.0
            if name == "dual_clip" and mask[i, j] and adv[i, j] < 0:
                want = min(want, -3.0 * adv[i, j].item())
            assert got[i, j].item() == pytest.approx(want, rel=1e-4, abs=1e-6)


def test_nan_outside_the_mask_leaks_neither_into_loss_nor_gradient() -> None:
    lp, old, adv, mask = batch(1)
    dirty = torch.where(mask.bool(), lp, torch.full_like(lp, math.nan)).requires_grad_()
    tokens = policy_loss(dirty, old, adv, mask, PolicyLoss())
    loss = aggregate("token-mean", tokens, mask, denominators(mask, max_length=7))
    loss.backward()
    assert torch.isfinite(loss)
    assert dirty.grad is not None
    assert torch.isfinite(dirty.grad).all()
    assert (dirty.grad[mask == 0] == 0).all()


def test_on_policy_gradient_is_minus_advantage_and_never_clipped() -> None:
    lp, _, adv, mask = batch(2)
    lp.requires_grad_()
    policy_loss(lp, lp.detach(), adv, mask, PolicyLoss()).sum().backward()
    assert lp.grad is not None
    torch.testing.assert_close(lp.grad, -adv * mask)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
@given(cut=st.integers(1, 4), seed=st.integers(0, 99))
def test_aggregation_does_not_depend_on_micro_batches(mode: str, cut: int, seed: int) -> None:
    loss, _, _, mask = batch(seed)
    mask[3] = 0
    totals = denominators(mask, max_length=7)
    whole = aggregate(mode, loss, mask, totals)
    parts = sum(aggregate(mode, x, m, totals) for x, m in zip(loss.split(cut), mask.split(cut), strict=True))
    torch.testing.assert_close(whole, parts, rtol=1e-6, atol=1e-6)


def test_aggregation_values_by_hand() -> None:
    loss = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    totals = denominators(mask, max_length=10)
    assert aggregate("token-mean", loss, mask, totals).item() == pytest.approx(9 / 3)
    assert aggregate("seq-mean-token-mean", loss, mask, totals).item() == pytest.approx((1.5 + 6) / 2)
    assert aggregate("seq-mean-token-const", loss, mask, totals).item() == pytest.approx(9 / 20)
    with pytest.raises(InputError, match="token-mean"):
        aggregate("mean", loss, mask, totals)


def test_kl_estimators_agree_with_the_true_divergence() -> None:
    g = torch.Generator().manual_seed(0)
    mu = torch.log_softmax(torch.randn(11, generator=g), -1)
    p = torch.log_softmax(torch.randn(11, generator=g) * 0.3 + mu, -1)
    true = (mu.exp() * (mu - p)).sum().item()
    ids = torch.multinomial(mu.exp(), 200_000, replacement=True, generator=g)
    mask = torch.ones(ids.shape)
    assert kl_k1(p[ids], mu[ids], mask).item() == pytest.approx(true, rel=0.05)
    assert kl_k3(p[ids], mu[ids], mask).item() == pytest.approx(true, rel=0.05)
    assert kl_k2(p[ids], mu[ids], mask).item() == pytest.approx(true, rel=0.5)
    assert kl_k3(p, p, torch.ones(11)).item() == 0
    assert kl_k1(torch.tensor([math.nan, -1.0]), torch.tensor([0.0, -2.0]), torch.tensor([0.0, 1.0])).item() == -1


def test_truncated_importance_weights() -> None:
    old, mu = torch.tensor([[0.0, -1.0, math.nan]]), torch.tensor([[-3.0, -0.5, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    got = truncated_importance_weights(old, mu, mask, cap=2.0)
    torch.testing.assert_close(got, torch.tensor([[2.0, math.exp(-0.5), 1.0]]))
    assert truncated_importance_weights(mu, mu - 1, mask, cap=0).eq(1).all()


@given(rewards)
def test_group_filter(values: list[float]) -> None:
    differ = GroupFilter.KEPT if len(set(values)) > 1 else GroupFilter.ALL_EQUAL
    want = GroupFilter.TOO_SMALL if len(values) < 2 else differ
    assert keep_group(values) is want


@given(st.integers(0, 60))
def test_overlong_penalty(length: int) -> None:
    got = soft_overlong_penalty(length, max_length=40, buffer=10)
    assert got == pytest.approx(0.0 if length <= 30 else max(-1.0, (30 - length) / 10))
    assert soft_overlong_penalty(length, max_length=40, buffer=0) == 0.0
