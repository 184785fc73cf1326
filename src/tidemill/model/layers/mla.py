"""The MLA token mixer over whole sequences (training form: expanded keys and values, no positions)."""

from __future__ import annotations

from itertools import repeat

import torch
from torch import Tensor, nn

from tidemill.kernels.mla import absorbed, expanded, head_matmul
from tidemill.kernels.pointwise import wide
from tidemill.model.config import TextConfig
from tidemill.model.layers.linear import Linear, RMSNorm
from tidemill.model.past import MlaPast, Step
from tidemill.parallel import ParallelContext, share

_MAX_ITEMS = 4096
"""Pages looked at in one call when going on from a past; bounds its memory."""


class LatentAttention(nn.Module):
    """x[B, T, d] -> [B, T, d], causal; with cu_seqlens, documents packed into x[1, T, d].

    The query latent and the output gate are options of the configuration. Heads are split over the tensor group; the
    latents are replicated.
    """

    def __init__(self, config: TextConfig, parallel: ParallelContext) -> None:
        super().__init__()
        c, d, dtype = config, config.hidden_size, config.torch_dtype
        self.config, self.parallel = config, parallel
        self.num_heads = share(c.num_attention_heads, parallel.tensor, what="num_attention_heads")
        if c.q_lora_rank is None:
            self.q_proj = Linear(d, self.num_heads * c.qk_head_dim, dtype)
        else:
            self.q_a_proj = Linear(d, c.q_lora_rank, dtype)
            self.q_a_layernorm = RMSNorm(c.q_lora_rank, c.mla_latent_norm_eps, dtype)
            self.q_b_proj = Linear(c.q_lora_rank, self.num_heads * c.qk_head_dim, dtype)
        self.kv_a_proj_with_mqa = Linear(d, c.kv_lora_rank + c.qk_rope_head_dim, dtype)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, c.mla_latent_norm_eps, dtype)
        self.kv_b_proj = Linear(c.kv_lora_rank, self.num_heads * (c.qk_nope_head_dim + c.v_head_dim), dtype)
        if c.mla_use_output_gate:
            self.g_proj = Linear(d, self.num_heads * c.v_head_dim, dtype)
        self.o_proj = Linear(self.num_heads * c.v_head_dim, d, dtype)

    def forward(self, x: Tensor, cu_seqlens: Tensor | None = None, past: tuple[MlaPast, Step] | None = None) -> Tensor:
        """With a past the documents are the new tokens of its step, and it is brought up to date."""
        c, shape = self.config, (*x.shape[:2], self.num_heads, -1)
        if c.q_lora_rank is None:
            q = self.q_proj(x).view(shape)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(shape)
        latent, k_pe = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        if past:
            past[0].append(past[1], torch.cat([latent, k_pe], dim=-1)[0])
        if past and not past[1].begins:
            o = self._absorbed(q[0], *past).to(x.dtype).unsqueeze(0).flatten(2)
        else:
            k_nope, v = self.kv_b_proj(latent).view(shape).split([c.qk_nope_head_dim, c.v_head_dim], dim=-1)
            o = expanded(q, k_nope, k_pe, v, c.mla_scale, cu_seqlens=cu_seqlens).flatten(2)
        if c.mla_use_output_gate:
            o = (torch.sigmoid(wide(self.g_proj(x))) * o).to(x.dtype)
        return self.parallel.tensor.all_reduce(self.o_proj(o))

    def _absorbed(self, q: Tensor, past: MlaPast, step: Step) -> Tensor:
        """o[R, H, V] fp32 of the step's queries q[R, H, nope + pe] over all kept latents up to their own."""
        c = self.config
        w = self.kv_b_proj.weight
        if type(self.kv_b_proj) is not Linear or self.kv_b_proj.lora_a is not None:
            # An adapter stands beside the weight: together they are what the map makes of the identity.
            w = self.kv_b_proj(torch.eye(c.kv_lora_rank, dtype=w.dtype)).t().contiguous()
        w = w.view(self.num_heads, -1, c.kv_lora_rank)
        uk, uv = w.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        q_lat = head_matmul(q[..., : c.qk_nope_head_dim].contiguous(), uk.contiguous())
        q_pe, pages, table, lengths = q[..., c.qk_nope_head_dim :], past.flat, past.table(step), step.positions + 1
        rows = max(1, _MAX_ITEMS // table.shape[1])
        o_lat = torch.cat([absorbed(*part, c.mla_scale) for part in zip(
            q_lat.split(rows), q_pe.split(rows), repeat(pages), table.split(rows), lengths.split(rows))])
        return head_matmul(o_lat, uv.transpose(1, 2).float().contiguous())
