"""Quantile balancing: the estimate against the exact quantile, and its independence of how a step is split."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidemill.kernels.moe import BiasHistogram, required_bias
from tidemill.model.balance import RouterBalance
from tidemill.model.causal_lm import CausalLM, Recompute
from tidemill.model.presets import tiny
from tidemill.parallel import SoloGroup

LAYER = 1
"""The first layer of the tiny model with experts."""


@st.composite
def steps(draw: st.DrawFn) -> tuple[Tensor, Tensor, int, int]:
    """scores[m, E] in (0, 1), bias[E], top k < E, number of bins."""
    experts = draw(st.integers(2, 12))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    spread = draw(st.sampled_from([0.0, 0.1, 1.0, 6.0]))
    scores = torch.sigmoid(spread * torch.randn(draw(st.integers(1, 80)), experts, generator=generator))
    bias = draw(st.sampled_from([0.0, 0.2, 3.0])) * torch.randn(experts, generator=generator)
    return scores, bias, draw(st.integers(1, experts - 1)), draw(st.sampled_from([1, 7, 100, 1000]))


def exact(scores: Tensor, bias: Tensor, k: int) -> Tensor:
    """Each expert's required bias of rank ceil(m·k/E), counted from the lowest; from the definition, fp64."""
    m, experts = scores.shape
    rank = -(-m * k // experts)
    found = []
    for j in range(experts):
        needed = []
        for i in range(m):
            cutoff = sorted((scores[i] + bias).tolist(), reverse=True)[k]
            needed.append(cutoff - float(scores[i, j]))
        found.append(sorted(needed)[rank - 1])
    return torch.tensor(found, dtype=torch.float64)


def estimate(counts: list[int], target: float, rank: int, low: float, width: float) -> float:
    """The quantile of one expert by a plain loop: linear inside the first bin at which `rank` values are reached."""
    before = 0
    for beta, inside in enumerate(counts):
        if before + inside >= rank:
            return low + (beta + min(max((target - before) / inside, 0.0), 1.0)) * width
        before += inside
    raise AssertionError("fewer values than the rank")


@settings(max_examples=100, deadline=None)
@given(steps())
def test_the_estimate_is_the_exact_quantile_within_one_bin(step: tuple[Tensor, Tensor, int, int]) -> None:
    scores, bias, k, bins = step
    m, experts = scores.shape
    histogram = BiasHistogram.empty(bias, bins).add(required_bias(scores, bias, k))
    low, width = float(bias.min()) - 1.0, (float(bias.max()) - float(bias.min()) + 2.0) / bins
    assert histogram.tokens == m
    assert histogram.counts.sum(1).tolist() == [m] * experts
    uncentred = torch.tensor([estimate(row, m * k / experts, -(-m * k // experts), low, width)
                              for row in histogram.counts.tolist()], dtype=torch.float64)
    assert float((uncentred - exact(scores, bias, k)).abs().max()) <= width * (1 + 1e-6) + 1e-6
    got = histogram.quantiles(k).double()
    torch.testing.assert_close(got, uncentred - uncentred.mean(), rtol=0, atol=1e-6)
    assert abs(float(got.mean())) < 1e-6


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 6), st.integers(0, 2**31))
def test_neither_order_nor_split_changes_a_bit(step: tuple[Tensor, Tensor, int, int], parts: int, seed: int) -> None:
    scores, bias, k, bins = step
    whole = BiasHistogram.empty(bias, bins).add(required_bias(scores, bias, k))
    shuffled = scores[torch.randperm(len(scores), generator=torch.Generator().manual_seed(seed))]
    pieces = [BiasHistogram.empty(bias, bins).add(required_bias(x, bias, k)) for x in shuffled.tensor_split(parts)]
    merged = pieces[-1]
    for piece in pieces[:-1]:
        merged = piece.merge(merged)
    assert merged.tokens == whole.tokens
    assert torch.equal(merged.counts, whole.counts)
    assert torch.equal(merged.quantiles(k), whole.quantiles(k))


def scores_of(rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.sigmoid(torch.randn(rows, tiny().text_config.num_experts, generator=generator))


def bias_after(*micro_batches: Tensor, masks: list[Tensor] | None = None) -> Tensor:
    """The bias of the first expert layer after one step of these scores."""
    model = CausalLM(tiny(), seed=1)
    balance = RouterBalance(model)
    for i, scores in enumerate(micro_batches):
        balance.mask = masks[i] if masks else None
        balance.observe(LAYER, scores)
    balance.apply()
    return model.state_dict()[f"model.layers.{LAYER}.block_sparse_moe.gate.e_score_correction_bias"]


def test_a_step_is_the_same_in_one_or_many_micro_batches() -> None:
    scores = scores_of(90)
    whole = bias_after(scores)
    assert whole.any()
    assert abs(float(whole.mean())) < 1e-6
    assert torch.equal(bias_after(*scores.split(7)), whole)
    assert torch.equal(bias_after(*reversed(scores.split([1, 60, 29]))), whole)


def test_padding_is_not_counted_whatever_its_scores() -> None:
    scores, mask = scores_of(90), torch.arange(90).view(3, 30) % 4 > 0
    real = bias_after(scores[mask.flatten()])
    assert not torch.equal(bias_after(scores), real)
    for seed in (1, 2):
        padded = torch.where(mask.flatten().unsqueeze(1), scores, scores_of(90, seed))
        assert torch.equal(bias_after(padded, masks=[mask]), real)
        assert torch.equal(bias_after(*padded.split(30), masks=list(mask.split(1))), real)


def test_ranks_join_their_counts() -> None:
    scores = scores_of(90)
    sent: list[Tensor] = []

    class Recorded(SoloGroup):
        def all_reduce(self, x: Tensor) -> Tensor:
            sent.append(x.clone())
            return x

    class Joined(SoloGroup):
        def all_reduce(self, x: Tensor) -> Tensor:
            return x + sent.pop(0)

    other = RouterBalance(CausalLM(tiny(), seed=1))
    other.observe(LAYER, scores[50:])
    other.reduce(Recorded())
    model = CausalLM(tiny(), seed=1)
    balance = RouterBalance(model)
    balance.observe(LAYER, scores[:50])
    unseen = len(sent) - 1
    assert unseen > 0
    # Both ranks saw nothing of the later layers; give those a token, so that there is a quantile to take.
    for layer in range(LAYER + 1, LAYER + 1 + unseen):
        balance.observe(layer, scores[:1])
    balance.reduce(Joined())
    balance.apply()
    got = model.state_dict()[f"model.layers.{LAYER}.block_sparse_moe.gate.e_score_correction_bias"]
    assert torch.equal(got, bias_after(scores))


@pytest.mark.parametrize("recompute", ["none", "layer"])
def test_a_layer_that_runs_again_in_backward_is_counted_once(recompute: Recompute) -> None:
    """Twice the counts would have the same quantiles, so the calls themselves are counted."""

    class Counting:
        def __init__(self) -> None:
            self.seen: list[int] = []

        def observe(self, layer: int, scores: Tensor) -> None:
            assert not scores.requires_grad
            assert scores.shape == (2 * 20, tiny().text_config.num_experts)
            self.seen.append(layer)

    observer, model = Counting(), CausalLM(tiny(), seed=1, recompute=recompute)
    ids = torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(1))
    model(ids, observer=observer).logsumexp(-1).sum().backward()
    assert observer.seen == sorted(tiny().text_config.moe_layers)
