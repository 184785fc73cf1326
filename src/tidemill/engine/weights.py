"""A base model's weights as the runner wants them: views of the read-only base, and derived buffers made from it.

Derived: packed experts decoded, narrow projections of one input laid side by side (so that one product serves them
all), MLA's kv_b split into its absorbed halves, residual queries multiplied out. They depend on the base only, never
on an adapter, are made at load, dropped by sleep and made again by wake.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.engine.memory.arena import Arena, padded_bytes
from tidemill.kernels import mxfp4
from tidemill.model.base import BaseStore
from tidemill.model.config import TextConfig


@dataclass(slots=True)
class KdaWeights:
    """in_proj[3P + G + D + H, d]: q|k|v, output gate, f_a, b side by side; G = P, or D of the gate's low rank, whose
    second map is then g_b_proj[P, D]. conv[3P, 4]."""

    in_proj: Tensor
    g_b_proj: Tensor | None
    conv: Tensor
    f_b_proj: Tensor
    a_log: Tensor
    dt_bias: Tensor
    o_norm: Tensor
    o_proj: Tensor


@dataclass(slots=True)
class MlaWeights:
    """in_proj[Q + (r + p) + H v, d]: q_a (or the whole q without a latent), kv_a, output gate if there is one.
    uk[H, nope, r], uv[H, r, v]."""

    in_proj: Tensor
    q_norm: Tensor | None
    q_b_proj: Tensor | None
    kv_norm: Tensor
    uk: Tensor
    uv: Tensor
    o_proj: Tensor


@dataclass(slots=True)
class DenseWeights:
    """gate_up[2 I, d]."""

    gate_up: Tensor
    down_proj: Tensor


@dataclass(slots=True)
class MoeWeights:
    """in_proj[2 S + l, d]: shared gate, shared up, latent down (if there is a latent). w1, w3[E, I, l], w2[E, l, I]."""

    router: Tensor
    bias: Tensor
    in_proj: Tensor
    w1: Tensor
    w3: Tensor
    w2: Tensor
    norm: Tensor | None
    up_proj: Tensor | None
    down_proj: Tensor


@dataclass(slots=True)
class LayerWeights:
    """One decoder layer. Queries are fp32 [d]: gain times pseudo-query of the residual mixture; None without one."""

    input_norm: Tensor
    post_norm: Tensor
    attn_query: Tensor | None
    ffn_query: Tensor | None
    attention: KdaWeights | MlaWeights
    ffn: DenseWeights | MoeWeights


class DerivedBuffers:
    """Tensors that can be dropped and made again in place."""

    def __init__(self) -> None:
        self._items: list[tuple[Arena, Tensor, Callable[[Tensor], None]]] = []

    def add(self, shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        """A new buffer, filled now by `fill(buffer)` and again by every `rebuild`."""
        arena = Arena(padded_bytes(shape, dtype))
        buffer = arena.tensor(shape, dtype)
        fill(buffer)
        self._items.append((arena, buffer, fill))
        return buffer

    @property
    def resident_bytes(self) -> int:
        """Bytes in memory now."""
        return sum(arena.resident_bytes() for arena, _, _ in self._items)

    def drop(self) -> None:
        """Give the memory back; the tensors read as zeros until `rebuild`."""
        for arena, _, _ in self._items:
            arena.release()

    def rebuild(self) -> None:
        """Fill every buffer again."""
        for _, buffer, fill in self._items:
            fill(buffer)


class EngineWeights:
    """Everything the runner reads, for one base."""

    def __init__(self, source: BaseStore, *, name: str) -> None:
        self.source, self.name = source, name
        self.model: TextConfig = source.config.text_config
        self.base_digest = source.digest
        self.derived = DerivedBuffers()
        self.embed_tokens = source.tensor("model.embed_tokens.weight")
        self.lm_head = source.tensor("lm_head.weight")
        self.norm = source.tensor("model.norm.weight")
        self.output_query = self._query("model.output_attn_res")
        self.layers = [self._layer(i) for i in range(self.model.num_hidden_layers)]

    @property
    def vocab_size(self) -> int:
        return self.model.vocab_size

    def _layer(self, index: int) -> LayerWeights:
        prefix = f"model.layers.{index}."
        get = self.source.tensor
        return LayerWeights(
            input_norm=get(prefix + "input_layernorm.weight"),
            post_norm=get(prefix + "post_attention_layernorm.weight"),
            attn_query=self._query(prefix + "self_attention_res"), ffn_query=self._query(prefix + "mlp_res"),
            attention=(self._mla if index in self.model.mla_layers else self._kda)(prefix + "self_attn."),
            ffn=self._moe(prefix + "block_sparse_moe.") if index in self.model.moe_layers
            else self._dense(prefix + "mlp."),
        )

    def _kda(self, prefix: str) -> KdaWeights:
        get, full = self.source.tensor, self.model.linear_attn_config.use_full_rank_gate
        return KdaWeights(
            in_proj=self._side_by_side(prefix, "q_proj", "k_proj", "v_proj", "g_proj" if full else "g_a_proj",
                                       "f_a_proj", "b_proj"),
            g_b_proj=None if full else get(prefix + "g_b_proj.weight"),
            conv=self._side_by_side(prefix, "q_conv1d", "k_conv1d", "v_conv1d"),
            f_b_proj=get(prefix + "f_b_proj.weight"), a_log=get(prefix + "A_log"), dt_bias=get(prefix + "dt_bias"),
            o_norm=get(prefix + "o_norm.weight"), o_proj=get(prefix + "o_proj.weight"),
        )

    def _mla(self, prefix: str) -> MlaWeights:
        c, get = self.model, self.source.tensor
        heads, nope, v, rank = c.num_attention_heads, c.qk_nope_head_dim, c.v_head_dim, c.kv_lora_rank

        def half(begin: int, end: int, *, transposed: bool) -> Callable[[Tensor], None]:
            def fill(out: Tensor) -> None:
                part = get(prefix + "kv_b_proj.weight").view(heads, nope + v, rank)[:, begin:end]
                out.copy_(part.transpose(1, 2) if transposed else part)
            return fill

        has_latent = c.q_lora_rank is not None
        gate = ("g_proj",) if c.mla_use_output_gate else ()
        return MlaWeights(
            in_proj=self._side_by_side(prefix, "q_a_proj" if has_latent else "q_proj", "kv_a_proj_with_mqa", *gate),
            q_norm=get(prefix + "q_a_layernorm.weight") if has_latent else None,
            q_b_proj=get(prefix + "q_b_proj.weight") if has_latent else None,
            kv_norm=get(prefix + "kv_a_layernorm.weight"),
            uk=self.derived.add((heads, nope, rank), c.torch_dtype, half(0, nope, transposed=False)),
            uv=self.derived.add((heads, rank, v), c.torch_dtype, half(nope, nope + v, transposed=True)),
            o_proj=get(prefix + "o_proj.weight"),
        )

    def _dense(self, prefix: str) -> DenseWeights:
        return DenseWeights(gate_up=self._side_by_side(prefix, "gate_proj", "up_proj"),
                            down_proj=self.source.tensor(prefix + "down_proj.weight"))

    def _moe(self, prefix: str) -> MoeWeights:
        get, has_latent = self.source.tensor, self.model.routed_expert_hidden_size is not None
        latent = ("routed_expert_down_proj",) if has_latent else ()
        return MoeWeights(
            router=get(prefix + "gate.weight"), bias=get(prefix + "gate.e_score_correction_bias"),
            in_proj=self._side_by_side(prefix, "shared_experts.gate_proj", "shared_experts.up_proj", *latent),
            w1=self._experts(prefix + "experts.w1"), w3=self._experts(prefix + "experts.w3"),
            w2=self._experts(prefix + "experts.w2"),
            norm=get(prefix + "routed_expert_norm.weight") if self.model.latent_moe_use_norm else None,
            up_proj=get(prefix + "routed_expert_up_proj.weight") if has_latent else None,
            down_proj=get(prefix + "shared_experts.down_proj.weight"),
        )

    def _experts(self, name: str) -> Tensor:
        c = self.model
        inner, latent = c.moe_intermediate_size, c.expert_width
        shape = (latent, inner) if name.endswith("w2") else (inner, latent)

        def fill(out: Tensor) -> None:
            if not c.quantize_experts:
                out.copy_(self.source.tensor(name))
                return
            packed, scale = self.source.packed(name)
            for e in range(c.num_experts):  # one at a time: decoding needs room of its own
                out[e].copy_(mxfp4.decode(packed[e], scale[e], dtype=c.torch_dtype))

        return self.derived.add((c.num_experts, *shape), c.torch_dtype, fill)

    def _side_by_side(self, prefix: str, *names: str) -> Tensor:
        """Weights [N_i, ...] of one input stacked over their outputs (a product's columns do not mix, so its bits are
        those of the separate products)."""
        full = [f"{prefix}{name}.weight" for name in names]
        parts = [self.source.tensor(name) for name in full]
        columns = parts[0].shape[-1]

        def fill(out: Tensor) -> None:
            begin = 0
            for name in full:
                part = self.source.tensor(name).reshape(-1, columns)
                out[begin : begin + len(part)].copy_(part)
                begin += len(part)

        return self.derived.add((sum(p.numel() for p in parts) // columns, columns), parts[0].dtype, fill)

    def _query(self, prefix: str) -> Tensor | None:
        if self.model.attn_res_block_size is None:
            return None

        def fill(out: Tensor) -> None:
            get = self.source.tensor
            out.copy_(get(prefix + "_norm.weight").float() * get(prefix + "_proj.weight").float().view(-1))

        return self.derived.add((self.model.hidden_size,), torch.float32, fill)
