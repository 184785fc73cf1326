"""The routed experts: gated feed-forward blocks, one per expert, in the latent space.

`experts` is the engine's form (row-invariant). Routing and the latent norm stand elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.kernels.linear import linear
from tidemill.kernels.lora import pad_rank
from tidemill.kernels.moe.dispatch import plan_dispatch
from tidemill.kernels.situ import GluAct


@dataclass(frozen=True, slots=True)
class ExpertLora:
    """Low-rank factors of the routed experts: w1 and w3 share one A, w2 shares one B over all experts.

    a13[r, l], b1[E, I, r], b3[E, I, r], a2[E, r, I], b2[l, r]; `scale` is alpha / r.
    """

    a13: Tensor
    b1: Tensor
    b3: Tensor
    a2: Tensor
    b2: Tensor
    scale: float

    def padded(self) -> ExpertLora:
        """The same with its rank zero-padded to a multiple of 16 (what `experts` wants; itself if it is)."""
        a13, b1 = pad_rank(self.a13, self.b1)
        a2, b2 = pad_rank(self.a2, self.b2)
        return ExpertLora(a13, b1, pad_rank(self.a13, self.b3)[1], a2, b2, self.scale)


def experts(
    z: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    act: GluAct,
    lora: ExpertLora | None = None,
) -> Tensor:
    """u[R, l] = Σ_j weights[:, j] · w2_e act(w1_e z, w3_e z), e = ids[:, j].

    z[R, l], ids[R, k] int64, weights[R, k] fp32, w1 and w3[E, I, l], w2[E, l, I], l and I at least 16. Each
    expert's output is in z's dtype; the weighted sum over the choices (in the order of ids) is fp32, one cast to
    z's dtype. Row-invariant: experts run as one batched product whose rows are padded to a multiple of 16. Mutates
    nothing.
    """
    plan = plan_dispatch(ids, w1.shape[0])
    x = plan.scatter(z)
    g = torch.bmm(x, w1.transpose(1, 2))
    u = torch.bmm(x, w3.transpose(1, 2))
    if lora is not None:
        lora = lora.padded()
        low = plan.scatter(linear(z, lora.a13))
        g.add_(torch.bmm(low, lora.b1.transpose(1, 2)).mul_(lora.scale))
        u.add_(torch.bmm(low, lora.b3.transpose(1, 2)).mul_(lora.scale))
    h = act(g, u)
    y = torch.bmm(h, w2.transpose(1, 2))
    if lora is not None:
        low = torch.bmm(h, lora.a2.transpose(1, 2))
        y.add_(linear(low.flatten(0, 1), lora.b2).view_as(y).mul_(lora.scale))
    return (plan.gather(y).float() * weights.unsqueeze(-1)).sum(1).to(z.dtype)
