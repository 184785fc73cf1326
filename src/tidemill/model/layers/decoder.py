"""One transformer layer: a token mixer and a channel mixer, reading either residual mixtures or the running sum."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tidemill.kernels.attn_res import mix_train
from tidemill.kernels.pointwise import wide
from tidemill.model.config import TextConfig
from tidemill.model.layers.kda import KimiDeltaAttention
from tidemill.model.layers.linear import RMSNorm, Weight
from tidemill.model.layers.mla import LatentAttention
from tidemill.model.layers.mlp import GatedMLP
from tidemill.model.layers.moe import LatentMoE
from tidemill.model.past import LayerPast
from tidemill.parallel import ParallelContext


def mixture(sources: Sequence[Tensor], norm: Weight, proj: Weight, eps: float) -> Tensor:
    """One residual mixture; norm gain and pseudo-query are multiplied in fp32."""
    return mix_train(sources, wide(norm.weight) * wide(proj.weight[0]), eps)


def pick(x: Tensor, select: Tensor) -> Tensor:
    """x[B, T, d] at flat positions: [S, d]."""
    return x.flatten(0, 1).index_select(0, select)


class DecoderLayer(nn.Module):
    """Layer `index` (0-based). The model keeps the bank of sources; the layer reads from it.

    Without attention residuals there is no bank and both mixers read the running sum itself.
    """

    def __init__(self, config: TextConfig, index: int, parallel: ParallelContext) -> None:
        super().__init__()
        d, dtype, eps = config.hidden_size, config.torch_dtype, config.rms_norm_eps
        self.index, self.eps = index, eps
        self.starts_block, self.mixes = config.starts_block(index), config.attn_res_block_size is not None
        self.input_layernorm = RMSNorm(d, eps, dtype)
        self.post_attention_layernorm = RMSNorm(d, eps, dtype)
        if self.mixes:
            self.self_attention_res_norm, self.mlp_res_norm = Weight(d, dtype=dtype), Weight(d, dtype=dtype)
            self.self_attention_res_proj, self.mlp_res_proj = Weight(1, d, dtype=dtype), Weight(1, d, dtype=dtype)
        self.self_attn = (LatentAttention if index in config.mla_layers else KimiDeltaAttention)(config, parallel)
        if index in config.moe_layers:
            self.block_sparse_moe = LatentMoE(config, parallel)
        else:
            self.mlp = GatedMLP(config, config.intermediate_size, parallel, what="intermediate_size")

    def forward(self, bank: Sequence[Tensor], p: Tensor, cu_seqlens: Tensor | None = None,
                select: Tensor | None = None, past: LayerPast | None = None,
                ) -> tuple[Sequence[Tensor], Tensor, Tensor | None]:
        """(bank, p, router scores [R, E] if there are experts) after this layer, from those before it: finished blocks
        and running sum, each [B, T, d]. `select` int64 [S] leaves only these flat positions to the channel mixer and to
        what is returned, [S, d]. A `past` is brought up to date."""
        y = self.attend(bank, p, cu_seqlens, past)
        if self.starts_block:
            bank, p = [*bank, p], y
        else:
            p = p + y
        if select is not None:
            bank, p = [pick(b, select) for b in bank], pick(p, select)
        out, scores = self.feed_forward(bank, p)
        return bank, p + out, scores

    def attend(self, bank: Sequence[Tensor], p: Tensor, cu_seqlens: Tensor | None = None,
               past: LayerPast | None = None) -> Tensor:
        """Output of the token mixer for finished blocks `bank` and running sum `p`, each [B, T, d]."""
        a = p
        if bank:
            a = mixture([*bank, p], self.self_attention_res_norm, self.self_attention_res_proj, self.eps)
        return self.self_attn(self.input_layernorm(a), cu_seqlens, past)

    def feed_forward(self, bank: Sequence[Tensor], p: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output of the channel mixer, router scores [R, E] if there are experts) for sources [..., d]."""
        m = p
        if self.mixes:
            m = mixture([*bank, p], self.mlp_res_norm, self.mlp_res_proj, self.eps)
        m = self.post_attention_layernorm(m)
        if not hasattr(self, "block_sparse_moe"):
            return self.mlp(m), None
        y, scores = self.block_sparse_moe(torch.flatten(m, 0, -2))
        return y.view_as(m), scores
