"""Quantile balancing over a training step: collects router scores of all expert layers, then moves their biases.

Used in pretraining and full fine-tuning. In LoRA runs the biases are part of the frozen base and nothing here runs.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from tidemill.kernels.moe import BiasHistogram, required_bias
from tidemill.model.causal_lm import CausalLM
from tidemill.model.layers import DecoderLayer, Router
from tidemill.parallel import Group


class RouterBalance:
    """One observer for all micro-batches of an optimiser step.

        balance = RouterBalance(model)
        balance.mask = attention_mask            # per micro-batch, [B, T] bool, True for real tokens
        model(input_ids, observer=balance)
        balance.reduce(group)                    # if several ranks share the step
        balance.apply()                          # after optimizer.step(); the next step starts empty
    """

    mask: Tensor | None = None
    """Which tokens count in the next forward; None counts all."""

    def __init__(self, model: CausalLM) -> None:
        self._top_k = model.config.text_config.num_experts_per_token
        self._routers: dict[int, Router] = {}
        for layer in model.model.layers:
            assert isinstance(layer, DecoderLayer)
            if hasattr(layer, "block_sparse_moe"):
                self._routers[layer.index] = layer.block_sparse_moe.gate
        self._histograms: dict[int, BiasHistogram] = {}

    def observe(self, layer: int, scores: Tensor) -> None:
        """Count scores[R, E] of one layer."""
        bias = self._routers[layer].e_score_correction_bias
        if self.mask is not None:
            scores = scores[self.mask.flatten()]
        histogram = self._histograms.get(layer) or BiasHistogram.empty(bias)
        self._histograms[layer] = histogram.add(required_bias(scores, bias, self._top_k))

    def reduce(self, group: Group) -> None:
        """Sum the counts over ranks that saw different micro-batches of one step."""
        for layer, router in self._routers.items():
            mine = self._histograms.get(layer) or BiasHistogram.empty(router.e_score_correction_bias)
            both = group.all_reduce(torch.cat([mine.counts.flatten(), torch.tensor([mine.tokens])]))
            self._histograms[layer] = replace(mine, counts=both[:-1].view_as(mine.counts), tokens=int(both[-1]))

    def apply(self) -> None:
        """Set every observed layer's bias for the next step and start counting anew."""
        with torch.no_grad():
            for layer, histogram in self._histograms.items():
                self._routers[layer].e_score_correction_bias.copy_(histogram.quantiles(self._top_k))
        self._histograms.clear()
