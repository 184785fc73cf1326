"""Intervals and comparisons for shares of correct answers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

Z95 = 1.959963984540054


def wilson(correct: int, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; (0, 1) for n = 0."""
    if n == 0:
        return 0.0, 1.0
    p = correct / n
    centre = p + Z95**2 / (2 * n)
    half = Z95 * math.sqrt(p * (1 - p) / n + Z95**2 / (4 * n * n))
    scale = 1 + Z95**2 / n
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Unbiased estimate of the chance that at least one of k samples is correct, from n >= k samples of one item."""
    if k > n:
        raise ValueError(f"k = {k} is larger than n = {n}")
    if n - correct < k:
        return 1.0
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def bootstrap_mean(values: Sequence[float], *, rounds: int = 4000, seed: int = 0) -> tuple[float, float]:
    """Percentile 95 % interval of a mean."""
    rng = np.random.default_rng(seed)
    array, n = np.asarray(values, dtype=np.float64), len(values)
    means = np.sort(np.fromiter((array[rng.integers(n, size=n)].mean() for _ in range(rounds)), np.float64, rounds))
    return float(means[int(0.025 * rounds)]), float(means[int(0.975 * rounds) - 1])


def mcnemar(only_a: int, only_b: int) -> float:
    """Exact two-sided p-value that two paired runs are equally good, from the items only one of them got right."""
    n = only_a + only_b
    if n == 0:
        return 1.0
    tail = sum(math.comb(n, i) for i in range(min(only_a, only_b) + 1)) / 2**n
    return min(1.0, 2 * tail)
