"""The KDA token mixer over whole sequences (training form)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tidemill.kernels import kda
from tidemill.kernels.conv import halo, short_conv_train
from tidemill.kernels.norm import gated_rms_norm_train, l2_norm_train
from tidemill.kernels.pointwise import wide
from tidemill.model.config import DTYPES, TextConfig
from tidemill.model.inventory import a_log_shape
from tidemill.model.layers.linear import Linear, Weight
from tidemill.model.past import KdaPast, Step
from tidemill.parallel import ParallelContext, share


class KimiDeltaAttention(nn.Module):
    """x[B, T, d] -> [B, T, d]; with cu_seqlens, documents packed into x[1, T, d]. Heads are split over the tensor
    group."""

    def __init__(self, config: TextConfig, parallel: ParallelContext) -> None:
        super().__init__()
        linear, d, dtype = config.linear_attn_config, config.hidden_size, config.torch_dtype
        self.num_heads = share(linear.num_heads, parallel.tensor, what="linear_attn_config.num_heads")
        self.head_dim, self.lower_bound = linear.head_dim, linear.gate_lower_bound
        self.eps, self.parallel, self.full_rank_gate = config.rms_norm_eps, parallel, linear.use_full_rank_gate
        width, exact = self.num_heads * self.head_dim, DTYPES[config.exact_dtype]
        self.q_proj, self.k_proj, self.v_proj = (Linear(d, width, dtype) for _ in range(3))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (
            Weight(width, 1, linear.short_conv_kernel_size, dtype=exact) for _ in range(3)
        )
        self.f_a_proj = Linear(d, self.head_dim, dtype)
        self.f_b_proj = Linear(self.head_dim, width, dtype)
        self.A_log = nn.Parameter(torch.empty(a_log_shape(config), dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.b_proj = Linear(d, self.num_heads, dtype)
        if self.full_rank_gate:
            self.g_proj = Linear(d, width, dtype)
        else:
            self.g_a_proj, self.g_b_proj = Linear(d, self.head_dim, dtype), Linear(self.head_dim, width, dtype)
        self.o_norm = Weight(self.head_dim, dtype=exact)
        self.o_proj = Linear(width, d, dtype)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, past: tuple[KdaPast, Step] | None = None) -> Tensor:
        """With a past the documents are the new tokens of its step, and it is brought up to date."""
        heads = (*x.shape[:2], self.num_heads, self.head_dim)
        inputs = [proj(x) for proj in (self.q_proj, self.k_proj, self.v_proj)]
        state, taps = past[0].read(past[1]) if past else (None, None)
        q, k, v = (
            short_conv_train(u, conv.weight, before, cu_seqlens=cu_seqlens).view(heads)
            for u, conv, before in zip(inputs, (self.q_conv1d, self.k_conv1d, self.v_conv1d),
                                       (None,) * 3 if taps is None else taps.chunk(3, dim=-1), strict=True)
        )
        q, k = l2_norm_train(q, scale=self.head_dim**-0.5), l2_norm_train(k)
        z = self.f_b_proj(self.f_a_proj(x)).view(heads)
        g = kda.gate_train(z, self.A_log, self.dt_bias, self.lower_bound)
        beta = torch.sigmoid(wide(self.b_proj(x)))
        o, state = kda.chunk(q, k, wide(v), g, beta, state, lower_bound=self.lower_bound, cu_seqlens=cu_seqlens)
        if past:
            past[0].write(past[1], state, halo(torch.cat(inputs, dim=-1), taps, cu_seqlens=cu_seqlens))
        gate = self.g_proj(x) if self.full_rank_gate else self.g_b_proj(self.g_a_proj(x))
        y = gated_rms_norm_train(o.to(x.dtype), self.o_norm.weight, gate.view(heads), self.eps)
        return self.parallel.tensor.all_reduce(self.o_proj(y.flatten(2)))
