"""The attention-residual mixture for training: sources stay separate tensors, and only references to them plus a
few scalars per token are kept for backward (K3 technical report, memory of attention residuals)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tidemill.kernels.pointwise import wide


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, eps: float, *sources: Tensor) -> Tensor:
        values = [wide(v) for v in sources]
        rstd = torch.stack([torch.linalg.vecdot(v, v) for v in values], -1)
        rstd = rstd.div_(query.shape[0]).add_(eps).rsqrt_()
        dots = torch.stack([v @ query for v in values], -1)
        weights = (dots * rstd).softmax(-1)
        out = values[0] * weights[..., 0:1]
        for i, v in enumerate(values[1:], 1):
            out.addcmul_(v, weights[..., i : i + 1])
        ctx.save_for_backward(query, rstd, dots, weights, *sources)
        return out.to(sources[0].dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        query, rstd, dots, weights, *sources = ctx.saved_tensors
        dout = wide(grad_outputs[0])
        da = torch.stack([torch.linalg.vecdot(wide(v), dout) for v in sources], -1)
        de = weights * (da - (da * weights).sum(-1, keepdim=True))
        scaled = de * rstd
        dquery = None
        if ctx.needs_input_grad[0]:
            dquery = torch.zeros_like(query)
            for i, v in enumerate(sources):
                dquery += scaled[..., i].reshape(-1) @ wide(v).flatten(0, -2)
        along = scaled * dots * rstd.square() / query.shape[0]
        grads: list[Tensor | None] = []
        for i, v in enumerate(sources):
            if not ctx.needs_input_grad[2 + i]:
                grads.append(None)
                continue
            dv = dout * weights[..., i : i + 1]
            dv.addcmul_(scaled[..., i : i + 1], query).addcmul_(wide(v), along[..., i : i + 1], value=-1.0)
            grads.append(dv.to(v.dtype))
        return dquery, None, *grads


def mix_train(sources: Sequence[Tensor], query: Tensor, eps: float) -> Tensor:
    """`mix` over a list of sources v_i[..., d] (one shape and dtype), oldest first -> [..., d] in their dtype.

    query[d] = norm gain ⊙ pseudo-query, fp32 (fp64 for fp64 sources). Differentiable in query and sources (first
    order).
    """
    return _Mix.apply(query, eps, *sources)
