"""The one map between tensors of a model folder and tensors of a GGUF file, in both directions.

Names and layouts are those llama.cpp loads for the architectures `kimi-k3` and `kimi-linear` (0c1e57098,
src/models/kimi-k3.cpp and kimi-linear.cpp). A mixture's norm gain and query come as their product, A_log as
-exp(A_log), kv_b split into a transposed key part and a value part; everything else keeps its numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor

from tidemill.kernels.mxfp4 import BLOCK
from tidemill.model.config import TextConfig
from tidemill.model.inventory import TensorSpec, a_log_shape, inventory

_HALF = BLOCK // 2


class Rule(Enum):
    """How one GGUF tensor follows from tensors of ours."""

    SAME = auto()
    """The same numbers in the same order, perhaps with axes of size 1 added."""
    DECAY = auto()
    """-exp(A_log) of the heads, without the padding."""
    SCORE = auto()
    """norm gain times query."""
    KEYS = auto()
    """The key part of kv_b, [H, rank, nope]."""
    VALUES = auto()
    """The value part of kv_b, [H, v, rank]."""
    EXPERTS = auto()
    """A stack of routed experts, packed or not."""


@dataclass(frozen=True, slots=True)
class Mapped:
    """One GGUF tensor. `exact`: always F32 (what llama.cpp reads as such), otherwise the dense choice."""

    name: str
    shape: tuple[int, ...]
    rule: Rule
    sources: tuple[str, ...]
    exact: bool


_TOP = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_conv1d": "ssm_conv1d_q", "self_attn.k_conv1d": "ssm_conv1d_k", "self_attn.v_conv1d": "ssm_conv1d_v",
    "self_attn.f_a_proj": "ssm_f_a", "self_attn.f_b_proj": "ssm_f_b", "self_attn.b_proj": "ssm_beta",
    "self_attn.g_a_proj": "ssm_g_a", "self_attn.g_b_proj": "ssm_g_b", "self_attn.o_norm": "ssm_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_a_proj": "attn_q_a", "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b", "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp", "block_sparse_moe.routed_expert_down_proj": "ffn_routed_down",
    "block_sparse_moe.routed_expert_up_proj": "ffn_routed_up",
    "block_sparse_moe.routed_expert_norm": "ffn_routed_norm",
    "block_sparse_moe.shared_experts.gate_proj": "ffn_gate_shexp",
    "block_sparse_moe.shared_experts.up_proj": "ffn_up_shexp",
    "block_sparse_moe.shared_experts.down_proj": "ffn_down_shexp",
}
_EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps"}
_SCORES = {"self_attention_res": "attn_res_score", "mlp_res": "ffn_res_score"}
_PLACE = re.compile(r"^model\.layers\.(\d+)\.(.+)$")


def mapped_tensors(c: TextConfig) -> dict[str, Mapped]:
    """Every GGUF tensor of this model, by name, in model order."""
    return {m.name: m for spec in inventory(c).values() for m in _map(c, spec)}


def _map(c: TextConfig, spec: TensorSpec) -> Iterator[Mapped]:
    place = _PLACE.match(spec.name)
    if place is None:
        yield from _map_top(spec)
        return
    layer, name = int(place[1]), place[2].removesuffix(".weight")
    block = f"blk.{layer}."
    if name.endswith("_res_norm"):
        site = name.removesuffix("_norm")
        yield _score(f"{block}{_SCORES[site]}.weight", spec)
    elif name.endswith("_res_proj"):
        return
    elif spec.is_expert:
        target = _EXPERTS[name.rpartition(".")[2]]
        yield Mapped(f"{block}{target}.weight", spec.shape, Rule.EXPERTS, (spec.name,), exact=False)
    elif name == "self_attn.A_log":
        heads = c.linear_attn_config.num_heads
        shape = (heads,) if c.family == "kimi_k3" else (heads, 1)
        yield Mapped(block + "ssm_a", shape, Rule.DECAY, (spec.name,), exact=True)
    elif name == "self_attn.dt_bias":
        yield Mapped(block + "ssm_dt.bias", spec.shape, Rule.SAME, (spec.name,), exact=True)
    elif name == "block_sparse_moe.gate.e_score_correction_bias":
        yield Mapped(block + "exp_probs_b.bias", spec.shape, Rule.SAME, (spec.name,), exact=True)
    elif name == "self_attn.kv_b_proj":
        heads, rank = c.num_attention_heads, c.kv_lora_rank
        yield Mapped(f"{block}attn_k_b.weight", (heads, rank, c.qk_nope_head_dim), Rule.KEYS, (spec.name,), exact=False)
        yield Mapped(f"{block}attn_v_b.weight", (heads, c.v_head_dim, rank), Rule.VALUES, (spec.name,), exact=False)
    elif name == "self_attn.g_proj":
        target = "ssm_g" if layer in c.kda_layers else "attn_gate"
        yield Mapped(f"{block}{target}.weight", spec.shape, Rule.SAME, (spec.name,), exact=False)
    else:
        width, shape = spec.shape[0], spec.shape
        conv = "conv1d" in name
        if conv:
            shape = (1, width, 1, spec.shape[-1])
        exact = conv or len(spec.shape) == 1 or name == "block_sparse_moe.gate"
        yield Mapped(f"{block}{_LAYER[name]}.weight", shape, Rule.SAME, (spec.name,), exact=exact)


def _map_top(spec: TensorSpec) -> Iterator[Mapped]:
    if spec.name == "model.output_attn_res_norm.weight":
        yield _score("output_res_score.weight", spec)
    elif spec.name in _TOP:
        yield Mapped(f"{_TOP[spec.name]}.weight", spec.shape, Rule.SAME, (spec.name,), exact=len(spec.shape) == 1)


def _score(name: str, norm: TensorSpec) -> Mapped:
    query = norm.name.replace("_res_norm.", "_res_proj.")
    return Mapped(name, norm.shape, Rule.SCORE, (norm.name, query), exact=True)


def to_gguf(c: TextConfig, m: Mapped, source: Callable[[str], Tensor]) -> Tensor:
    """The values of one GGUF tensor other than experts, of `m.shape`; `source` gives tensors of ours by name."""
    x = source(m.sources[0])
    if m.rule is Rule.DECAY:
        return -x.float().flatten()[: c.linear_attn_config.num_heads].exp().view(m.shape)
    if m.rule is Rule.SCORE:
        return x.float() * source(m.sources[1]).float().flatten()
    if m.rule in (Rule.KEYS, Rule.VALUES):
        heads = x.view(c.num_attention_heads, -1, c.kv_lora_rank)
        keys, values = heads.split([c.qk_nope_head_dim, c.v_head_dim], dim=1)
        return keys.transpose(1, 2) if m.rule is Rule.KEYS else values
    return x.reshape(m.shape)


def from_gguf(c: TextConfig, spec: TensorSpec, by_source: Mapping[str, list[Mapped]],
              stored: Callable[[str], Tensor]) -> Tensor:
    """One tensor of ours other than experts, of spec's shape; `stored` gives GGUF tensors by name.

    A mixture's norm gain becomes 1 and its query the score, which is the same function.
    """
    parts = by_source[spec.name]
    rule = parts[0].rule
    if rule is Rule.SCORE and spec.name == parts[0].sources[0]:
        return torch.ones(spec.shape)
    if rule is Rule.DECAY:
        decay = torch.zeros(c.linear_attn_config.stored_a_log)
        decay[: c.linear_attn_config.num_heads] = torch.log(-stored(parts[0].name).float().flatten())
        return decay.view(a_log_shape(c))
    if rule in (Rule.KEYS, Rule.VALUES):
        part = {m.rule: stored(m.name) for m in parts}
        return torch.cat([part[Rule.KEYS].transpose(1, 2), part[Rule.VALUES]], dim=1).reshape(spec.shape)
    return stored(parts[0].name).reshape(spec.shape)


def mapped_by_source(c: TextConfig) -> dict[str, list[Mapped]]:
    """The GGUF tensors each tensor of ours goes into."""
    found: dict[str, list[Mapped]] = {}
    for m in mapped_tensors(c).values():
        for name in m.sources:
            found.setdefault(name, []).append(m)
    return found


def to_blocks(packed: Tensor, scale: Tensor) -> Tensor:
    """packed u8 [..., K/2] and scale u8 [..., K/32] as ggml's blocks u8 [..., K/32, 17]: the scale byte, then byte j
    with element j in its low nibble and element j+16 in its high one. Lossless."""
    pairs = packed.unflatten(-1, (-1, _HALF))
    codes = torch.stack([pairs & 0xF, pairs >> 4], dim=-1).flatten(-2)
    data = codes[..., :_HALF] | (codes[..., _HALF:] << 4)
    return torch.cat([scale.unsqueeze(-1), data], dim=-1)


def codes_of(blocks: Tensor) -> Tensor:
    """The packed codes u8 [..., K/2] of ggml's blocks; with `scales_of` the inverse of `to_blocks`."""
    data = blocks[..., 1:]
    codes = torch.cat([data & 0xF, data >> 4], dim=-1).unflatten(-1, (-1, 2))
    return (codes[..., 0] | (codes[..., 1] << 4)).flatten(-2)


def scales_of(blocks: Tensor) -> Tensor:
    """The scale bytes u8 [..., K/32] of ggml's blocks."""
    return blocks[..., 0].contiguous()
