"""From logits to tokens for the rows of one step, each by its own request's parameters.

A row's token and log-probs are a function of its logits, its request's parameters and history, and (seed, sequence,
position): never of the other rows. Order: non-finite test, then bias, penalties and masks, then temperature and
filters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tidemill.core.engine_api import SamplingParams
from tidemill.core.errors import InputError
from tidemill.engine.request import Request
from tidemill.kernels.sampling import sample, uniform

MIN_TEMPERATURE = 0.01
"""Below this, fp32 logits divided by it may overflow; 0 asks for greedy sampling."""
_MASK64 = 0xFFFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class Drawn:
    """One entry per row. `failed` rows had a NaN or infinite logit; their other entries mean nothing."""

    ids: list[int]
    logprobs: list[float]
    model_logprobs: list[float]
    failed: list[bool]
    top: dict[int, tuple[tuple[int, float], ...]]
    """Best raw log-probs, for the rows whose request asked for them."""


class Sampler:
    """Sampling parameters by state slot, as arrays, so that a step gathers them without a loop over requests."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab = vocab_size
        self._temperature = np.ones(num_slots, dtype=np.float32)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._sequence = np.zeros(num_slots, dtype=np.uint64)
        self._special = np.zeros(num_slots, dtype=bool)
        """Slots whose request needs a change of logits or the best alternatives."""

    def admit(self, slot: int, params: SamplingParams) -> None:
        """Note the parameters of the request that now runs in `slot`."""
        self._temperature[slot] = params.temperature
        self._top_p[slot], self._min_p[slot], self._top_k[slot] = params.top_p, params.min_p, params.top_k
        self._seed[slot] = params.seed & _MASK64
        self._sequence[slot] = params.sequence & _MASK64
        self._special[slot] = bool(params.top_logprobs or _changes_logits(params))

    def draw(self, logits: Tensor, requests: list[Request], slots: NDArray[np.int64],
             positions: NDArray[np.int64]) -> Drawn:
        """Sample one token per row of logits[R, V]; `positions` are the absolute positions the new tokens get."""
        finite = torch.isfinite(logits).all(-1)
        failed = finite.logical_not()
        any_failed = bool(failed.any())
        if any_failed:
            logits = logits.masked_fill(failed.unsqueeze(-1), 0.0)
        special = np.flatnonzero(self._special[slots]).tolist()
        changed = self._change(logits, requests, special) if special else logits
        filters = bool((self._top_p[slots] < 1).any() or (self._min_p[slots] > 0).any()
                       or (self._top_k[slots] > 0).any())
        drawn = sample(
            changed, torch.from_numpy(uniform(self._seed[slots], self._sequence[slots], positions.astype(np.uint64))),
            torch.from_numpy(self._temperature[slots]),
            top_k=torch.from_numpy(self._top_k[slots]) if filters else None,
            top_p=torch.from_numpy(self._top_p[slots]) if filters else None,
            min_p=torch.from_numpy(self._min_p[slots]) if filters else None,
        )
        model, top = drawn.model_logprobs, dict[int, tuple[tuple[int, float], ...]]()
        if special:
            raw = logits.float().log_softmax(-1)
            model = raw.gather(1, drawn.ids.unsqueeze(-1)).squeeze(-1)
            top = {row: _best(raw[row], requests[row].sampling.top_logprobs) for row in special
                   if requests[row].sampling.top_logprobs}
        return Drawn(drawn.ids.tolist(), drawn.logprobs.tolist(), model.tolist(),
                     failed.tolist() if any_failed else [False] * len(requests), top)

    def _change(self, logits: Tensor, requests: list[Request], special: list[int]) -> Tensor:
        """Bias, penalties and masked stop tokens, on a copy."""
        rows: list[int] = []
        columns: list[int] = []
        amounts: list[float] = []
        for row in special:
            for token, amount in _changes(requests[row]).items():
                rows.append(row)
                columns.append(token)
                amounts.append(amount)
        if not rows:
            return logits
        changed = logits.float().clone()
        changed[rows, columns] += torch.tensor(amounts)
        return changed


def validate(params: SamplingParams, vocab_size: int) -> None:
    """Raise InputError naming the first parameter that is out of range."""
    checks = (
        ("max_tokens", params.max_tokens, params.max_tokens >= 0, "an integer >= 0"),
        ("temperature", params.temperature,
         params.temperature == 0 or MIN_TEMPERATURE <= params.temperature <= 100.0, f"0 or {MIN_TEMPERATURE} to 100"),
        ("top_p", params.top_p, 0 < params.top_p <= 1, "a number in (0, 1]"),
        ("min_p", params.min_p, 0 <= params.min_p <= 1, "a number in [0, 1]"),
        ("top_k", params.top_k, params.top_k >= 0, "an integer >= 0 (0: no limit)"),
        ("min_tokens", params.min_tokens, params.min_tokens >= 0, "an integer >= 0"),
        ("top_logprobs", params.top_logprobs, 0 <= params.top_logprobs <= 20, "0 to 20"),
        ("frequency_penalty", params.frequency_penalty, -2 <= params.frequency_penalty <= 2, "-2 to 2"),
        ("presence_penalty", params.presence_penalty, -2 <= params.presence_penalty <= 2, "-2 to 2"),
    )
    for name, value, ok, expected in checks:
        if not ok:
            raise InputError(f"{name} = {value}: expected {expected}", field=name)
    for token in params.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise InputError(f"stop_token_ids holds {token}: expected 0 to {vocab_size - 1}", field="stop_token_ids")
    for token, bias in params.logit_bias:
        if not 0 <= token < vocab_size:
            raise InputError(f"logit_bias names token {token}: expected 0 to {vocab_size - 1}", field="logit_bias")
        if not -100 <= bias <= 100:
            raise InputError(f"logit_bias of token {token} = {bias}: expected -100 to 100", field="logit_bias")
    if params.min_tokens and len(set(params.stop_token_ids)) >= vocab_size:
        raise InputError("stop_token_ids covers the whole vocabulary and min_tokens masks it all",
                         field="stop_token_ids")


def needs_counts(params: SamplingParams) -> bool:
    """Whether the request's sampled tokens must be counted."""
    return bool(params.frequency_penalty or params.presence_penalty)




def _best(logprobs: Tensor, k: int) -> tuple[tuple[int, float], ...]:
    order = torch.sort(logprobs, descending=True, stable=True)
    return tuple(zip(order.indices[:k].tolist(), order.values[:k].tolist(), strict=True))


def _changes_logits(params: SamplingParams) -> bool:
    return bool(params.logit_bias or needs_counts(params) or (params.min_tokens and params.stop_token_ids))


def _changes(request: Request) -> dict[int, float]:
    """What to add to this request's logits, by token. Penalties count the tokens this request sampled (OpenAI's rule:
    logit -= count * frequency_penalty + (count > 0) * presence_penalty)."""
    params = request.sampling
    amounts: dict[int, float] = {}
    for token, bias in params.logit_bias:
        amounts[token] = amounts.get(token, 0.0) + bias
    for token, count in request.counts.items():
        amounts[token] = amounts.get(token, 0.0) - count * params.frequency_penalty - params.presence_penalty
    if len(request.ids) < params.min_tokens:
        amounts |= dict.fromkeys(params.stop_token_ids, -math.inf)
    return amounts
