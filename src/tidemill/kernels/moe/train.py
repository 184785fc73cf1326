"""The routed experts for training: one padded batched product per weight, no loop over experts, differentiable."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.kernels.moe.dispatch import Dispatch, plan_dispatch
from tidemill.kernels.moe.experts import ExpertLora
from tidemill.kernels.situ import GluAct


class _Scatter(torch.autograd.Function):
    """Rows to the expert buffer. Every pair has its own slot, so the gradient is a gather and a sum over the k
    choices."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        return plan.scatter(x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.plan.gather(grad_outputs[0]).sum(1), None


class _Combine(torch.autograd.Function):
    """u[R, l] = Σ_j weights[R, j] y[slot of (R, j)]: expert outputs back to rows, summed in fp32."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor, plan: Dispatch) -> Tensor:
        ctx.plan = plan
        ctx.save_for_backward(y, weights)
        pairs = plan.gather(y)
        return (pairs.to(weights.dtype) * weights.unsqueeze(-1)).sum(1).to(y.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        y, weights = ctx.saved_tensors
        du = grad_outputs[0].to(weights.dtype)
        dweights = None
        if ctx.needs_input_grad[1]:
            dweights = torch.matmul(ctx.plan.gather(y).to(weights.dtype), du.unsqueeze(-1)).squeeze(-1)
        dpairs = (weights.unsqueeze(-1) * du.unsqueeze(1)).to(y.dtype)
        dy = torch.zeros_like(y).flatten(0, 1)
        dy[ctx.plan.slots] = dpairs.flatten(0, 1)
        return dy.view_as(y), dweights, None


def experts_train(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    act: GluAct,
    lora: ExpertLora | None = None,
) -> Tensor:
    """`experts` for training: the same arguments and result, differentiable in z, weights, all expert weights and
    `lora`.

    Equals the engine's form to rounding. `lora` factors may have any rank.
    """
    plan = plan_dispatch(ids, w1.shape[0])
    x = _Scatter.apply(z, plan)
    g = torch.bmm(x, w1.transpose(1, 2))
    u = torch.bmm(x, w3.transpose(1, 2))
    if lora is not None:
        low = _Scatter.apply(torch.nn.functional.linear(z, lora.a13), plan)
        g = torch.baddbmm(g, low, lora.b1.transpose(1, 2), alpha=lora.scale)
        u = torch.baddbmm(u, low, lora.b3.transpose(1, 2), alpha=lora.scale)
    h = act.train(g, u)
    y = torch.bmm(h, w2.transpose(1, 2))
    if lora is not None:
        low = torch.bmm(h, lora.a2.transpose(1, 2))
        y = torch.add(y, torch.nn.functional.linear(low, lora.b2), alpha=lora.scale)
    return _Combine.apply(y, weights, plan)
