"""One forward over the flat rows of many sequences, from token ids to the last hidden states.

Obeys the numerics contract (docs/numerics.md): every product over rows is padded to 16, KDA is the per-token
recurrence in every phase, MLA is absorbed and walks absolute pages in every phase, sums over experts, sources and
pages run in an order known from the row alone. So a row's bits depend on its token, its position and its own past
only. Knows no requests: a Batch says which rows belong to which slot and pages.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.engine.adapters import LiveAdapter
from tidemill.engine.batch import Batch
from tidemill.engine.memory.pools import Pools
from tidemill.engine.weights import DenseWeights, EngineWeights, KdaWeights, MlaWeights, MoeWeights
from tidemill.kernels import kda, mla, moe
from tidemill.kernels.attn_res import mix
from tidemill.kernels.conv import short_conv, short_conv_rows
from tidemill.kernels.linear import linear
from tidemill.kernels.norm import gated_rms_norm, rms_norm
from tidemill.kernels.pointwise import sigmoid
from tidemill.model.adapter_view import Factors, LayerAdapter

REVISION = "torch-rows/1"


class Runner:
    """Computes on weights and pools it does not own. Mutates the pools: states, taps and latents of the batch's
    rows."""

    def __init__(self, weights: EngineWeights, pools: Pools, page_table: Tensor) -> None:
        """`page_table[num_slots, pages_per_sequence]` int64 is read at each forward."""
        self._w, self._pools, self._page_table = weights, pools, page_table
        self._c = weights.model
        self._linear = weights.model.linear_attn_config

    @property
    def numerics(self) -> str:
        """Identifies the arithmetic; states are only valid under the same."""
        return f"{REVISION} {self._c.dtype} torch-{torch.__version__}"

    def forward(self, batch: Batch, adapter: LiveAdapter | None) -> Tensor:
        """Final normalised hidden states [Rp, d] of the batch's rows (padding rows at the end); updates the pools."""
        c, w = self._c, self._w
        plan = self._plan_tiles(batch) if c.mla_layers else None
        p = w.embed_tokens.index_select(0, batch.token_ids)
        sources = p.unsqueeze(1)
        for index, layer in enumerate(w.layers):
            lora = adapter.layers[index] if adapter else None
            a = p if index == 0 else self._residual(sources, p, layer.attn_query)
            x = rms_norm(a, layer.input_norm, c.rms_norm_eps)
            if isinstance(layer.attention, KdaWeights):
                y = self._kda(index, layer.attention, x, batch, lora)
            else:
                assert plan is not None
                y = self._mla(index, layer.attention, x, batch, plan, lora)
            if c.starts_block(index):
                # The finished block joins the bank (at layer 0: the embedding, as the only row) and p starts anew.
                sources = torch.cat([sources if index == 0 else _with_last(sources, p), y.unsqueeze(1)], dim=1)
                p = y
            else:
                p = p + y
            x = rms_norm(self._residual(sources, p, layer.ffn_query), layer.post_norm, c.rms_norm_eps)
            p = p + (self._dense(layer.ffn, x, lora) if isinstance(layer.ffn, DenseWeights)
                     else self._moe(layer.ffn, x, lora))
        return rms_norm(self._residual(sources, p, w.output_query), w.norm, c.rms_norm_eps)

    def logits(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """Logits [len(rows), vocab] of chosen rows, in the model's dtype."""
        return linear(hidden.index_select(0, rows), self._w.lm_head)

    def _residual(self, sources: Tensor, p: Tensor, query: Tensor | None) -> Tensor:
        """What a sublayer reads: the mixture over the bank and p, or without mixtures p itself."""
        return p if query is None else mix(_with_last(sources, p), query, self._c.rms_norm_eps)

    def _plan_tiles(self, batch: Batch) -> mla.TilePlan:
        """Attention's work items, the same for every MLA layer: each row sees its past and itself."""
        tokens = mla.tokens_per_tile(self._c.num_attention_heads, len(batch.active))
        table = self._page_table.index_select(0, batch.slots)
        return mla.plan_tiles(table, batch.starts, torch.from_numpy(batch.counts), batch.row_sequence,
                              batch.positions, tokens)

    def _kda(self, index: int, w: KdaWeights, x: Tensor, batch: Batch, lora: LayerAdapter | None) -> Tensor:
        heads, dim, width = self._linear.num_heads, self._linear.head_dim, self._linear.width
        rows = batch.num_rows
        u = linear(x, w.in_proj)
        gate_width = width if w.g_b_proj is None else dim
        qkv, gate, f_a, b = u.split([3 * width, gate_width, dim, heads], dim=1)
        if w.g_b_proj is not None:
            gate = linear(gate, w.g_b_proj)
        z = linear(f_a, w.f_b_proj)[:rows].view(rows, heads, dim)
        mixed = self._convolve(index, qkv[:rows], w.conv, batch)
        q, k, v = (part.view(rows, heads, dim) for part in mixed.split(width, dim=1))
        q, k = kda.qk_norm(q.contiguous(), k.contiguous())
        g = kda.gate(z, w.a_log, w.dt_bias, self._linear.gate_lower_bound)
        o = torch.zeros((x.shape[0], heads, dim))
        self._recur(index, batch, q, k, v.float().contiguous(), g, sigmoid(b[:rows].contiguous()), o)
        y = gated_rms_norm(o.to(x.dtype), w.o_norm, gate.reshape(-1, heads, dim), self._c.rms_norm_eps).view(-1, width)
        return _adapted(y, w.o_proj, lora and lora.get("self_attn.o_proj"))

    def _convolve(self, index: int, new: Tensor, w: Tensor, batch: Batch) -> Tensor:
        """Convolve each row with its three predecessors [R, 3P]; carries the last three inputs of each sequence on."""
        pool = self._pools.taps[index]
        carried = pool.index_select(0, batch.slots)
        if batch.taps is None or batch.carry is None:
            taps = torch.cat([carried, new.unsqueeze(1)], dim=1)
            pool.index_copy_(0, batch.slots, taps[:, 1:])
            return short_conv(taps, w)
        known = torch.cat([carried.flatten(0, 1), new])
        pool.index_copy_(0, batch.slots, known[batch.carry])
        return short_conv_rows(known, batch.taps, w)

    def _recur(self, index: int, batch: Batch, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor,
               out: Tensor) -> None:
        """KDA token by token over all sequences that still have one; fills out[:R] and updates the states."""
        pool = self._pools.kda[index]
        in_place = batch.slot_range is not None
        S = pool[slice(*batch.slot_range)] if batch.slot_range else pool.index_select(0, batch.slots)
        for n, begin in zip(batch.active, batch.offsets, strict=True):
            r = slice(begin, begin + n)
            out[r] = kda.step(S[:n], q[r], k[r], v[r], g[r], beta[r])
        if not in_place:
            pool.index_copy_(0, batch.slots, S)

    def _mla(self, index: int, w: MlaWeights, x: Tensor, batch: Batch, plan: mla.TilePlan,
             lora: LayerAdapter | None) -> Tensor:
        c, rows = self._c, batch.num_rows
        heads, nope, pe, rank = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim, c.kv_lora_rank
        u = linear(x, w.in_proj)
        q_width = c.q_lora_rank or heads * (nope + pe)
        q, kv, gate = u[:, :q_width], u[:, q_width : q_width + rank + pe], u[:, q_width + rank + pe :]
        if lora:
            q = _plus(q, x, lora.get("self_attn.q_a_proj"))
            kv = _plus(kv, x, lora.get("self_attn.kv_a_proj_with_mqa"))
        if w.q_norm is not None and w.q_b_proj is not None:
            q = linear(rms_norm(q.contiguous(), w.q_norm, c.mla_latent_norm_eps), w.q_b_proj)
        q = q.reshape(-1, heads, nope + pe)
        latent = torch.cat([rms_norm(kv[:, :rank].contiguous(), w.kv_norm, c.mla_latent_norm_eps), kv[:, rank:]], dim=1)
        pages = self._pools.latents[index]
        pages.view(-1, rank + pe).index_copy_(0, batch.latent_rows, latent[:rows])
        q_lat = mla.head_matmul(q[..., :nope].contiguous(), w.uk)
        o_lat = x.new_zeros((x.shape[0], heads, rank))
        o_lat[:rows] = mla.absorbed_tiles(q_lat[:rows], q[:rows, :, nope:], pages, c.mla_scale, plan)
        o = mla.head_matmul(o_lat, w.uv).view(-1, heads * c.v_head_dim)
        if c.mla_use_output_gate:
            o = (o.float() * sigmoid(gate)).to(x.dtype)
        return _adapted(o, w.o_proj, lora and lora.get("self_attn.o_proj"))

    def _dense(self, w: DenseWeights, x: Tensor, lora: LayerAdapter | None) -> Tensor:
        return self._glu(linear(x, w.gate_up), x, w.down_proj, lora, "mlp.")

    def _moe(self, w: MoeWeights, x: Tensor, lora: LayerAdapter | None) -> Tensor:
        c = self._c
        u = linear(x, w.in_proj)
        z = x if w.up_proj is None else u[:, 2 * c.shared_intermediate_size :].contiguous()
        ids, weights = moe.route(x, w.router, w.bias, c.num_experts_per_token, c.moe_renormalize,
                                 c.routed_scaling_factor)
        y = moe.experts(z, ids, weights, w.w1, w.w3, w.w2, c.glu_act, lora.experts if lora else None)
        if w.norm is not None:
            y = rms_norm(y, w.norm, c.rms_norm_eps)
        shared = self._glu(u[:, : 2 * c.shared_intermediate_size], x, w.down_proj, lora,
                           "block_sparse_moe.shared_experts.")
        return (y if w.up_proj is None else linear(y, w.up_proj)) + shared

    def _glu(self, gate_up: Tensor, x: Tensor, down: Tensor, lora: LayerAdapter | None, prefix: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        if lora:
            gate, up = _plus_pair(gate, up, x, lora.get(prefix + "gate_proj"), lora.get(prefix + "up_proj"))
        h = self._c.glu_act(gate, up)
        return _adapted(h, down, lora and lora.get(prefix + "down_proj"))


def _adapted(x: Tensor, w: Tensor, lora: Factors | None) -> Tensor:
    y = linear(x, w)
    return y if lora is None else y.add_(lora.delta(x))


def _plus(y: Tensor, x: Tensor, lora: Factors | None) -> Tensor:
    return y if lora is None else y + lora.delta(x)


def _plus_pair(gate: Tensor, up: Tensor, x: Tensor, lora_gate: Factors | None, lora_up: Factors | None,
               ) -> tuple[Tensor, Tensor]:
    """`_plus` for two maps of one input that share their A factor: A x is computed once."""
    if lora_gate is None or lora_up is None or lora_gate.a is not lora_up.a:
        return _plus(gate, x, lora_gate), _plus(up, x, lora_up)
    low = linear(x, lora_gate.a)
    return (gate + linear(low, lora_gate.b).mul_(lora_gate.scale), up + linear(low, lora_up.b).mul_(lora_up.scale))


def _with_last(sources: Tensor, p: Tensor) -> Tensor:
    """sources[R, m, d] with its last row, the running sum of the current block, set to p. In place and contiguous."""
    sources[:, -1] = p
    return sources
