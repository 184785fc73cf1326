"""Sigmoid routing with a selection bias. Ties go to the lower expert index."""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.kernels.linear import linear
from tidemill.kernels.pointwise import sigmoid, wide


def route(
    x: Tensor, w_router: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Which experts a row uses and how much: ids[R, k] int64 and weights[R, k] fp32, by falling biased score.

    x[R, d], w_router[E, d], bias[E] fp32. Scores s = sigmoid(fp32(x) fp32(W)ᵀ); the bias takes part in the
    selection only; weights are the unbiased scores, divided by their sum + 1e-20 (if `renormalize` and k > 1),
    times `scale`. Row-invariant; the choice is a stable sort, so ties go to the lowest index.
    """
    scores = sigmoid(linear(x.float(), w_router.float()))
    ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = scores.gather(1, ids)
    if renormalize and top_k > 1:
        weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
    return ids, weights if scale == 1.0 else weights * scale


def route_train(
    x: Tensor, w_router: Tensor, bias: Tensor, top_k: int, renormalize: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`route` for training: (ids, weights, scores[R, E]), weights and scores differentiable in x and w_router.

    The same rules; rounding may differ from `route` in the last bit. `scores` feed quantile balancing.
    """
    scores = torch.sigmoid(torch.nn.functional.linear(wide(x), wide(w_router)))
    with torch.no_grad():
        ids = torch.sort(scores + bias, dim=-1, descending=True, stable=True).indices[:, :top_k].contiguous()
    weights = scores.gather(1, ids)
    if renormalize and top_k > 1:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights if scale == 1.0 else weights * scale, scores
