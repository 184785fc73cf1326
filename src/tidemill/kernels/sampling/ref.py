"""Sampling of one token per row. A row's token and log-prob depend on that row's logits, parameters and uniform only.

Does not know requests, stop tokens or penalties: callers change the logits first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Sampled:
    """ids[R] int64; logprobs[R] fp32 under the distribution sampled from (0.0 for greedy rows); model_logprobs[R]
    fp32 under the plain softmax of the logits given."""

    ids: Tensor
    logprobs: Tensor
    model_logprobs: Tensor


def sample(
    logits: Tensor,
    uniforms: Tensor,
    temperature: Tensor,
    *,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
) -> Sampled:
    """Draw one token per row.

    logits[R, V] finite or -inf (never a whole row of -inf); uniforms[R] float64 in [0, 1); temperature[R] fp32 (0:
    greedy, the lowest id on ties); top_k[R] int64 (0: off), top_p[R] fp32 (1: off), min_p[R] fp32 (0: off); None:
    off for all rows. Filters act on the tempered distribution in the order min_p, top_k, top_p, ties to the lower
    id; the rest is renormalised. The token is the first whose cumulative probability (fp64) exceeds u · total.
    Mutates nothing.
    """
    model = logits.float().log_softmax(-1)
    ids = logits.argmax(-1)
    logprobs = torch.zeros(logits.shape[0])
    warm = (temperature > 0).nonzero().flatten()
    if warm.numel():
        every = warm.numel() == logits.shape[0]
        rows = logits if every else logits[warm]
        scaled = (rows.float() / temperature[warm].unsqueeze(-1)).log_softmax(-1)
        scaled = _filter(scaled, _pick(top_k, warm), _pick(top_p, warm), _pick(min_p, warm))
        cumulative = scaled.double().exp_().cumsum(-1)
        target = uniforms[warm].unsqueeze(-1) * cumulative[:, -1:]
        last = scaled.isfinite().long().cumsum(-1).argmax(-1, keepdim=True)
        chosen = torch.minimum((cumulative <= target).sum(-1, keepdim=True), last)
        ids = ids.scatter(0, warm, chosen.squeeze(-1))
        logprobs[warm] = scaled.gather(1, chosen).squeeze(-1)
    return Sampled(ids, logprobs, model.gather(1, ids.unsqueeze(-1)).squeeze(-1))


def _pick(values: Tensor | None, rows: Tensor) -> Tensor | None:
    return None if values is None else values[rows]


def _filter(logp: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None) -> Tensor:
    """Log-probs with the filtered tokens at -inf and the rest renormalised; rows without a filter are untouched."""
    wanted = torch.zeros(logp.shape[0], dtype=torch.bool)
    for values, off in ((top_k, 0), (top_p, 1.0), (min_p, 0.0)):
        if values is not None:
            wanted |= values != off
    rows = wanted.nonzero().flatten()
    if not rows.numel():
        return logp
    order = torch.sort(logp[rows], dim=-1, descending=True, stable=True)
    kept = order.values
    if min_p is not None:
        kept = kept.masked_fill(kept < kept[:, :1] + min_p[rows].unsqueeze(-1).log(), -torch.inf)
    if top_k is not None:
        limit = torch.where(top_k[rows] > 0, top_k[rows], logp.shape[1]).unsqueeze(-1)
        kept = kept.masked_fill(torch.arange(logp.shape[1]) >= limit, -torch.inf)
    if top_p is not None:
        p = kept.double().exp_()
        before = p.cumsum(-1) - p
        cut = before >= top_p[rows].double().unsqueeze(-1) * p.sum(-1, keepdim=True)
        cut[:, 0] = False
        kept = kept.masked_fill(cut & (top_p[rows] < 1.0).unsqueeze(-1), -torch.inf)
    filtered = torch.full_like(kept, -torch.inf).scatter(1, order.indices, kept.log_softmax(-1))
    return logp.index_copy(0, rows, filtered)
