"""The policy update: LoRA on a frozen base whose experts are exactly the bytes the engine serves.

One optimizer step per call of `step`. Gradients exist only inside it; `sleep` drops what is left. Nothing here draws
random numbers, so a step is a pure function of adapter, optimizer state and samples (bit for bit at one thread).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor

from tidemill.core.errors import TrainError
from tidemill.model.base import BaseStore
from tidemill.model.lora import LoraConfig, attach, export_adapter, load_adapter
from tidemill.train.algorithms import Denominators, PolicyLoss, aggregate, denominators, kl_k1, kl_k3, policy_loss
from tidemill.train.algorithms.corrections import truncated_importance_weights
from tidemill.train.config import RlSection
from tidemill.train.samples import MicroBatch, Sample, micro_batches

MAX_BAD_STEPS = 3
"""Non-finite gradients in a row after which the run stops."""


class StepOutcome(StrEnum):
    """What became of a step."""

    NORMAL = "normal"
    SKIPPED = "skipped"
    """The gradient was not finite; nothing changed."""
    EMPTY = "empty"
    """There was no sample with an advantage; nothing changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """Figures of one optimizer step; means run over sampled tokens."""

    outcome: StepOutcome
    loss: float
    grad_norm: float
    kl_k1: float
    """Mean of log mu - log p between engine (mu) and trainer (p) before the update."""
    kl_k3: float
    clip_share: float
    entropy: float
    """Mean of -log p of the sampled tokens: an estimate of the policy's entropy in nats per token."""
    tokens: int
    seconds: float


class Trainer:
    """Model, adapter and optimizer. Not thread-safe; used while the engine sleeps."""

    def __init__(self, store: BaseStore, lora: LoraConfig, rl: RlSection, *, seed: int, max_sampled: int) -> None:
        """`max_sampled`: sampled tokens an episode may have; L_max of aggregation `seq-mean-token-const`."""
        self.lora, self.rl = lora, rl
        self._max_sampled = max_sampled
        self._store = store
        self.model = store.model()
        self.parameters = attach(self.model, lora, seed=seed)
        self._reference = store.model() if rl.kl_coef > 0 else None
        self._bad_steps = 0
        self._optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.AdamW:
        rl = self.rl
        return torch.optim.AdamW(self.parameters, lr=rl.lr, betas=rl.betas, weight_decay=rl.weight_decay, foreach=True)

    def adapter(self) -> dict[str, Tensor]:
        """The adapter's tensors by exported name: views that the next step changes."""
        return export_adapter(self.model, self.lora)

    def sleep(self) -> None:
        """Drop gradients; activations are gone already."""
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> dict[str, Any]:
        """Everything a later process needs to go on bit for bit: adapter and optimizer state."""
        return {"adapter": {n: x.clone() for n, x in self.adapter().items()},
                "optimizer": self._optimizer.state_dict(), "bad_steps": self._bad_steps}

    def load_state(self, state: dict[str, Any]) -> None:
        """Undo `state`. ManifestError if the adapter does not fit."""
        self.parameters = load_adapter(self.model, self.lora, state["adapter"])
        self._optimizer = self._make_optimizer()
        self._optimizer.load_state_dict(state["optimizer"])
        self._bad_steps = int(state["bad_steps"])

    @torch.no_grad()
    def score(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        """Log-probs (temperature 1) of every token but the first of each sequence under the current adapter."""
        samples = [Sample(tuple(s), (False, *[True] * (len(s) - 1)), (0.0,) * len(s), 0.0) for s in sequences]
        out: list[Tensor] = [torch.empty(0)] * len(samples)
        for batch in micro_batches(samples, max_tokens=self.rl.micro_batch_tokens):
            values, mask = batch.spread(self._logprobs(self.model, batch, temperature=1.0))
            for row, index in enumerate(batch.samples):
                out[index] = values[row, : int(mask[row].sum())]
        return out

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """One update per epoch. Raises TrainError after MAX_BAD_STEPS non-finite gradients in a row."""
        started = time.monotonic()
        useful = [s for s in samples if s.advantage != 0.0 and s.num_sampled]
        if not useful:
            return StepReport(outcome=StepOutcome.EMPTY, loss=0.0, grad_norm=0.0, kl_k1=0.0, kl_k3=0.0, clip_share=0.0,
                              entropy=0.0, tokens=0, seconds=time.monotonic() - started)
        # Samples with zero advantage have no gradient but stay in the denominators of the global batch.
        batches = list(micro_batches([s for s in samples if s.num_sampled], max_tokens=self.rl.micro_batch_tokens))
        old: list[Tensor] | None = None
        if self.rl.epochs > 1:
            with torch.no_grad():
                old = [self._logprobs(self.model, b, temperature=self.rl.temperature) for b in batches]
        figures = None
        outcome = StepOutcome.NORMAL
        for _ in range(self.rl.epochs):
            outcome, epoch_figures = self._epoch(batches, old)
            figures = figures or epoch_figures
        assert figures is not None
        return StepReport(outcome=outcome, seconds=time.monotonic() - started, **figures)

    def _epoch(self, batches: Sequence[MicroBatch], old: Sequence[Tensor] | None) -> tuple[StepOutcome, dict[str, Any]]:
        totals = self._totals(batches)
        self._optimizer.zero_grad(set_to_none=True)
        sums: dict[str, float] = {"loss": 0.0, "k1": 0.0, "k3": 0.0, "clip": 0.0, "entropy": 0.0}
        for i, batch in enumerate(batches):
            logp = self._logprobs(self.model, batch, temperature=self.rl.temperature)
            loss, parts = self._loss(batch, logp, logp.detach() if old is None else old[i], totals)
            loss.backward()
            for key, value in parts.items():
                sums[key] += value
        norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, self.rl.grad_clip, error_if_nonfinite=False))
        outcome = self._apply(norm)
        tokens = max(1, totals.tokens)
        return outcome, {"loss": sums["loss"], "grad_norm": norm, "kl_k1": sums["k1"] / tokens,
                         "kl_k3": sums["k3"] / tokens, "clip_share": sums["clip"] / tokens,
                         "entropy": sums["entropy"] / tokens, "tokens": totals.tokens}

    def _apply(self, norm: float) -> StepOutcome:
        if not math.isfinite(norm):
            self._bad_steps += 1
            self._optimizer.zero_grad(set_to_none=True)
            if self._bad_steps >= MAX_BAD_STEPS:
                raise TrainError(f"the gradient was not finite in {self._bad_steps} steps in a row",
                                 remedy="Lower rl.lr or look at the last episodes of this run.")
            return StepOutcome.SKIPPED
        self._bad_steps = 0
        if norm == 0.0:
            raise TrainError("the gradient is exactly 0 although samples carry advantages: the adapter is not reached")
        self._optimizer.step()
        return StepOutcome.NORMAL

    def _totals(self, batches: Sequence[MicroBatch]) -> Denominators:
        per_sequence = torch.cat([torch.bincount(b.rows, minlength=b.ids.shape[0]) for b in batches])
        longest = int(per_sequence.max()) if len(per_sequence) else 1
        mask = (torch.arange(longest) < per_sequence.unsqueeze(-1)).float()
        return denominators(mask, max_length=self._max_sampled)

    def _loss(self, batch: MicroBatch, logp: Tensor, old: Tensor,
              totals: Denominators) -> tuple[Tensor, dict[str, float]]:
        rl = self.rl
        p, mask = batch.spread(logp)
        p_old, _ = batch.spread(old)
        mu, _ = batch.spread(batch.rollout_logprobs)
        adv, _ = batch.spread(batch.advantages)
        settings = PolicyLoss(name=rl.loss, clip_low=rl.clip_low, clip_high=rl.clip_high, dual_clip=rl.dual_clip)
        tokens = policy_loss(p, p_old, adv, mask, settings)
        tokens = tokens * truncated_importance_weights(p_old, mu, mask, cap=rl.tis_cap)
        if self._reference is not None:
            with torch.no_grad():
                q, _ = batch.spread(self._logprobs(self._reference, batch, temperature=rl.temperature))
            d = q - p
            tokens = tokens + rl.kl_coef * (torch.expm1(d) - d)
        loss = aggregate(rl.aggregation, tokens, mask, totals)
        count = float(mask.sum())
        ratio = (p.detach() - p_old).exp()
        clipped = ((ratio > 1 + rl.clip_high) & (adv > 0)) | ((ratio < 1 - rl.clip_low) & (adv < 0))
        return loss, {
            "loss": float(loss.detach()), "k1": float(kl_k1(p_old, mu, mask)) * count,
            "k3": float(kl_k3(p_old, mu, mask)) * count, "clip": float((clipped * mask).sum()),
            "entropy": -float(p.detach().sum()),
        }

    def _logprobs(self, model: torch.nn.Module, batch: MicroBatch, *, temperature: float) -> Tensor:
        """Log-probs [S] of the batch's targets, fp32."""
        logits = model(batch.ids, select=batch.select).float()
        if temperature != 1.0:
            logits = logits / temperature
        return logits.log_softmax(-1).gather(-1, batch.targets.unsqueeze(-1)).squeeze(-1)
