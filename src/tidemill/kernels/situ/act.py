"""The activation of a gated feed-forward block as one object: SiTU (K3) or SwiGLU (Kimi Linear)."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from tidemill.kernels.pointwise import silu
from tidemill.kernels.situ.ref import situ_glu, situ_glu_train


@dataclass(frozen=True, slots=True)
class GluAct:
    """act(g, u) of the raw gate and up projections, two tensors of one shape and dtype.

    With `beta` SiTU: β of the gate branch, and the cap `linear_beta` of the up branch (None: no cap). Without it
    silu(g) · u, silu in fp32 with a cast before the product.
    """

    beta: float | None = None
    linear_beta: float | None = None

    def __call__(self, g: Tensor, u: Tensor) -> Tensor:
        """The engine's form: row-invariant, no gradient. Mutates nothing."""
        if self.beta is None:
            return silu(g).to(g.dtype) * u
        return situ_glu(g, u, self.beta, self.linear_beta)

    def train(self, g: Tensor, u: Tensor) -> Tensor:
        """The same function, differentiable in g and u."""
        if self.beta is None:
            return F.silu(g) * u
        return situ_glu_train(g, u, self.beta, self.linear_beta)
