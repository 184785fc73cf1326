"""Intervals and comparisons against published values, closed forms and simulation."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.agent.stats import bootstrap_mean, mcnemar, pass_at_k, wilson


def test_wilson_known_values() -> None:
    # Newcombe (1998), table I: 81 of 263 and 15 of 148, 0 of 20, 1 of 29.
    for (correct, n), (low, high) in {
        (81, 263): (0.2553, 0.3662), (15, 148): (0.0624, 0.1605), (0, 20): (0.0, 0.1611), (1, 29): (0.0061, 0.1718),
    }.items():
        assert wilson(correct, n) == pytest.approx((low, high), abs=5e-5)
    assert wilson(0, 0) == (0.0, 1.0)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_mirrors(row: tuple[int, int]) -> None:
    correct, n = row
    low, high = wilson(correct, n)
    assert 0.0 <= low <= correct / n <= high <= 1.0
    assert wilson(n - correct, n) == pytest.approx((1 - high, 1 - low), abs=1e-12)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_subsets_with_a_hit(row: tuple[int, int, int]) -> None:
    n, correct, k = row
    subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
    assert pass_at_k(n, correct, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


def test_pass_at_k_needs_k_samples() -> None:
    with pytest.raises(ValueError, match="larger than n"):
        pass_at_k(3, 1, 4)


def test_bootstrap_covers() -> None:
    rng = random.Random(1)
    hits = 0
    for trial in range(60):
        low, high = bootstrap_mean([rng.random() for _ in range(40)], rounds=400, seed=trial)
        hits += low <= 0.5 <= high
    assert hits >= 50
    assert bootstrap_mean([0.3] * 10, rounds=200) == pytest.approx((0.3, 0.3))


def test_mcnemar_exact() -> None:
    # Two-sided binomial test: 2 * P(X <= 3 | 12, 1/2) = 0.1460; equal counts are no evidence at all.
    assert mcnemar(3, 9) == mcnemar(9, 3) == pytest.approx(0.14599609375)
    assert mcnemar(5, 5) == mcnemar(0, 0) == 1.0
    assert mcnemar(0, 20) < 1e-5
