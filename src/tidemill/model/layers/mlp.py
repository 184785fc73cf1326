"""The dense gated feed-forward block: layer 0 and the shared experts."""

from __future__ import annotations

from torch import Tensor, nn

from tidemill.model.config import TextConfig
from tidemill.model.layers.linear import Linear
from tidemill.parallel import ParallelContext, share


class GatedMLP(nn.Module):
    """x[..., d] -> [..., d] = down(act(gate x, up x)), act SiTU or SwiGLU. Columns of gate and up are split over the
    tensor group."""

    def __init__(self, config: TextConfig, width: int, parallel: ParallelContext, *, what: str) -> None:
        super().__init__()
        d, dtype = config.hidden_size, config.torch_dtype
        self.act = config.glu_act
        self.parallel = parallel
        inner = share(width, parallel.tensor, what=what)
        self.gate_proj = Linear(d, inner, dtype)
        self.up_proj = Linear(d, inner, dtype)
        self.down_proj = Linear(inner, d, dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = self.act.train(self.gate_proj(x), self.up_proj(x))
        return self.parallel.tensor.all_reduce(self.down_proj(h))
