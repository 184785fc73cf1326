"""The routed experts for training: grouped products over rows sorted by expert, gradients written out.

Kept for the backward pass are the inputs, the routing weights, the order and the two pre-activations of every pair;
sorted inputs and the activation are made again. Neither these nor any buffer depends on how evenly rows are routed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.kernels import mxfp8
from tidemill.kernels.moe.experts import ExpertLora
from tidemill.kernels.moe.grouped import Groups, grouped_outer, grouped_product, plan_groups
from tidemill.kernels.pointwise import wide
from tidemill.kernels.situ import GluAct


class _Experts(torch.autograd.Function):
    """Inputs z, weights, w1, w3, w2, then groups, act, scale, whether to round inputs through MXFP8, and the
    five factors of an adapter or nothing."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, weights: Tensor, w1: Tensor, w3: Tensor, w2: Tensor, groups: Groups,
                act: GluAct, scale: float, rounded: bool, *factors: Tensor) -> Tensor:
        if rounded:
            z = mxfp8.round_trip(z)
        x = groups.spread(z)
        g = grouped_product(x, w1.transpose(1, 2), groups)
        u = grouped_product(x, w3.transpose(1, 2), groups)
        del x
        if factors:
            a13, b1, b3, _, _ = factors
            low = groups.spread(z @ a13.t())
            g.add_(grouped_product(low, b1.transpose(1, 2), groups), alpha=scale)
            u.add_(grouped_product(low, b3.transpose(1, 2), groups), alpha=scale)
        ctx.save_for_backward(z, weights, w1, w3, w2, g, u, *factors)
        ctx.groups, ctx.act, ctx.scale, ctx.rounded = groups, act, scale, rounded
        h = act.train(g, u)
        if rounded:
            h = mxfp8.round_trip(h)
        y = grouped_product(h, w2.transpose(1, 2), groups)
        if factors:
            _, _, _, a2, b2 = factors
            y.add_(grouped_product(h, a2.transpose(1, 2), groups) @ b2.t(), alpha=scale)
        return groups.combine(y, weights)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        z, weights, w1, w3, w2, g, u, *factors = ctx.saved_tensors
        groups, scale, need = ctx.groups, ctx.scale, ctx.needs_input_grad
        g, u = g.detach().requires_grad_(), u.detach().requires_grad_()
        with torch.enable_grad():
            activated = ctx.act.train(g, u)
        h = mxfp8.round_trip(activated) if ctx.rounded else activated.detach()
        # With y = h w2ᵀ and v = dout w2: dweight = ⟨dout, y⟩ = ⟨v, h⟩ and dh = weight · v, so y is not needed.
        dout = groups.spread(grad_outputs[0])
        v = grouped_product(dout, w2, groups)
        share = weights.flatten().index_select(0, groups.order).unsqueeze(-1)
        weighted = (share * h).to(h.dtype)
        da2 = db2 = None
        if factors:
            _, _, _, a2, b2 = factors
            dlow = (dout @ b2).mul_(scale)
            v = v + grouped_product(dlow, a2, groups)
            da2 = grouped_outer(dlow, weighted, groups)
            db2 = (dout.t() @ grouped_product(weighted, a2.transpose(1, 2), groups)).mul_(scale)
        dweights = (wide(v) * wide(h)).sum(-1)[groups.places].to(weights.dtype) if need[1] else None
        dw2 = grouped_outer(dout, weighted, groups) if need[4] else None
        del dout, weighted
        dg, du = torch.autograd.grad(activated, (g, u), (share * v).to(h.dtype))
        x = groups.spread(z) if need[2] or need[3] else None
        dw1 = grouped_outer(dg, x, groups) if x is not None and need[2] else None
        dw3 = grouped_outer(du, x, groups) if x is not None and need[3] else None
        dz = None
        if need[0]:
            dz = groups.gather_sum(grouped_product(dg, w1, groups) + grouped_product(du, w3, groups))
        if not factors:
            return dz, dweights, dw1, dw3, dw2, None, None, None, None
        a13, b1, b3, _, _ = factors
        low = groups.spread(z @ a13.t())
        db1, db3 = (grouped_outer(d, low, groups).mul_(scale) for d in (dg, du))
        dlow = groups.gather_sum(grouped_product(dg, b1, groups) + grouped_product(du, b3, groups)).mul_(scale)
        if dz is not None:
            dz = dz + dlow @ a13
        return dz, dweights, dw1, dw3, dw2, None, None, None, None, dlow.t() @ z, db1, db3, da2, db2


def experts_train(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    act: GluAct,
    lora: ExpertLora | None = None,
    *,
    mxfp8_inputs: bool = False,
) -> Tensor:
    """`experts` for training: the same arguments and result, differentiable (once) in z, weights, all expert weights
    and `lora`.

    Equals the engine's form to rounding. With `mxfp8_inputs` z and the activation's output are rounded through MXFP8
    before their products, the adapter's included, gradients straight through; l and I are then multiples of 32
    (InputError, also for NaN and infinity). R may be 0, experts may be without rows, `lora` factors may have any rank.
    Keeps z (as rounded), weights, 2·R·k·I numbers and 2·R·k indices for the backward pass, however rows are routed.
    Mutates nothing.
    """
    groups = plan_groups(ids, w1.shape[0])
    factors = () if lora is None else (lora.a13, lora.b1, lora.b3, lora.a2, lora.b2)
    scale = 0.0 if lora is None else lora.scale
    return _Experts.apply(z, weights, w1, w3, w2, groups, act, scale, mxfp8_inputs, *factors)
