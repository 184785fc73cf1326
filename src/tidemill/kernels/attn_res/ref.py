"""The mixture of Block Attention Residuals: what a sublayer reads instead of a running residual sum.

Source: AttnRes (arXiv 2603.15031) and the K3 technical report. Keeping the bank of sources is the model's business.
"""

from __future__ import annotations

from torch import Tensor


def mix(sources: Tensor, query: Tensor, eps: float) -> Tensor:
    """Σ_i softmax_i(e) · v_i with e_i = query · (v_i / sqrt(mean(v_i²) + eps)).

    sources[R, m, d] contiguous, oldest first; query[d] fp32 = norm gain ⊙ pseudo-query. Keys are RMS-normalised
    sources, values the sources as they are. fp32 inside, one cast to sources' dtype -> [R, d]. Row-invariant;
    differentiable.
    """
    v = sources.float()
    rstd = (v * v).mean(-1, keepdim=True).add_(eps).rsqrt_()
    weights = (v * rstd * query).sum(-1).softmax(-1)
    return (v * weights[..., None]).sum(1).to(sources.dtype)
