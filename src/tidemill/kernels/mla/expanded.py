"""Multi-head latent attention with expanded keys and values: the training form over whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.kernels.pointwise import wide


def expanded(q: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention o[B, T, H, V] = softmax(scale · (q_n·k_n + q_p·p), τ <= t) v, differentiable.

    q[B, T, H, nope + pe], k_nope[B, T, H, nope], k_pe[B, T, pe] shared by the heads, v[B, T, H, V]. Scores, softmax
    and sums in fp32 (fp64 for fp64 inputs), one cast to v's dtype. Padding at the right end of a sequence touches
    no earlier token.
    """
    batch, length, heads, _ = q.shape
    keys = torch.cat([k_nope, k_pe.unsqueeze(2).expand(-1, -1, heads, -1)], dim=-1)
    qh, kh, vh = (wide(x).transpose(1, 2).reshape(batch * heads, length, -1) for x in (q, keys, v))
    future = torch.full((length, length), -torch.inf, dtype=qh.dtype).triu(1)
    scores = torch.baddbmm(future.expand(batch * heads, -1, -1), qh, kh.transpose(1, 2), alpha=scale)
    out = torch.bmm(scores.softmax(-1), vh)
    return out.view(batch, heads, length, -1).transpose(1, 2).to(v.dtype)
