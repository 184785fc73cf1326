"""Quantile balancing of the router's selection bias, without auxiliary losses (K3 technical report, 2.3.3).

Per optimiser step each expert's required biases are counted in a histogram; at the end the bias moves to the
quantile that would have given every expert its fair share. Counts are integers, so the result does not depend on
how tokens were split over micro-batches or ranks. Frozen when LoRA is trained: then the bias is part of the base.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.core.errors import InputError

NUM_BINS = 1000


@dataclass(frozen=True, slots=True)
class BiasHistogram:
    """Counts of required biases: counts[E, bins] int64 over [low, low + bins · width), for the `tokens` seen so
    far."""

    counts: Tensor
    low: float
    width: float
    tokens: int

    @classmethod
    def empty(cls, bias: Tensor, num_bins: int = NUM_BINS) -> BiasHistogram:
        """For the current bias[E]: range [min − 1, max + 1], which every required bias falls into."""
        if num_bins < 1:
            raise InputError(f"num_bins = {num_bins}: expected at least 1", field="num_bins")
        low, high = float(bias.min()) - 1.0, float(bias.max()) + 1.0
        counts = torch.zeros((bias.shape[0], num_bins), dtype=torch.int64)
        return cls(counts, low, (high - low) / num_bins, 0)

    def add(self, required: Tensor) -> BiasHistogram:
        """With the required biases[m, E] of m more tokens (padding left out by the caller); self is unchanged."""
        bins = self.counts.shape[1]
        index = ((required.double() - self.low) / self.width).floor().long().clamp_(0, bins - 1)
        flat = (index + torch.arange(self.counts.shape[0]) * bins).flatten()
        counts = self.counts + torch.bincount(flat, minlength=self.counts.numel()).view_as(self.counts)
        return BiasHistogram(counts, self.low, self.width, self.tokens + required.shape[0])

    def merge(self, other: BiasHistogram) -> BiasHistogram:
        """Counts of both (other micro-batches or ranks). InputError if their ranges differ."""
        if (self.low, self.width) != (other.low, other.width):
            raise InputError("histograms over different ranges cannot be merged", field="other")
        return BiasHistogram(self.counts + other.counts, self.low, self.width, self.tokens + other.tokens)

    def quantiles(self, top_k: int) -> Tensor:
        """The centred new bias[E] fp32: the (k/E)-quantile of each expert's required biases, minus the mean over
        experts.

        InputError if no token was counted.
        """
        if not self.tokens:
            raise InputError("quantile balancing needs at least one token", field="tokens")
        experts = self.counts.shape[0]
        target = self.tokens * top_k / experts
        cumulative = self.counts.cumsum(1)
        first = (cumulative >= -(-self.tokens * top_k // experts)).long().argmax(1, keepdim=True)
        inside = self.counts.gather(1, first).double()
        before = cumulative.gather(1, first).double() - inside
        part = ((target - before) / inside).clamp_(0.0, 1.0)
        bias = (self.low + (first + part) * self.width).squeeze(1)
        return (bias - bias.mean()).float()


def required_bias(scores: Tensor, bias: Tensor, top_k: int) -> Tensor:
    """r[m, E]: the bias at which an expert would just have been chosen: the (k+1)-th largest biased score of the
    token minus the expert's raw score. scores[m, E] fp32, bias[E]; needs E > k (InputError)."""
    if scores.shape[1] <= top_k:
        raise InputError(f"top_k = {top_k}: expected fewer than {scores.shape[1]} experts", field="top_k")
    cutoff = torch.topk(scores + bias, top_k + 1, dim=-1).values[:, -1:]
    return cutoff - scores
