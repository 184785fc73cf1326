"""Every tensor of a model by name, shape, dtype and component, from the configuration alone.

Names are the checkpoint's, with the routed experts of a layer stacked (`...experts.w1` [E, out, in]);
tidemill.model.names maps stacked names to the per-expert ones. Counts of parameters are sums over this list.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from tidemill.model.config import TextConfig, VisionConfig

EXPERT_WEIGHTS = ("w1", "w2", "w3")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor. `dtype` is a torch name; `component` groups it in counts."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    component: str

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_expert(self) -> bool:
        """A stack of routed experts (stored packed if the experts are quantised)."""
        return self.component == "routed_experts"


def inventory(config: TextConfig) -> dict[str, TensorSpec]:
    """All tensors, in model order, by stacked name."""
    return {spec.name: spec for spec in _specs(config)}


def parameter_counts(config: TextConfig) -> dict[str, int]:
    """Parameters by component."""
    counts: dict[str, int] = {}
    for spec in _specs(config):
        counts[spec.component] = counts.get(spec.component, 0) + spec.numel
    return counts


def total_parameters(config: TextConfig) -> int:
    """All parameters of the text model."""
    return sum(parameter_counts(config).values())


def active_parameters(config: TextConfig) -> int:
    """Parameters one token is multiplied with: all but unchosen experts and the input embedding (the head counts)."""
    unused = 0
    for spec in _specs(config):
        if spec.is_expert:
            unused += spec.numel // config.num_experts * (config.num_experts - config.num_experts_per_token)
    return total_parameters(config) - unused - config.vocab_size * config.hidden_size


def vision_inventory(v: VisionConfig, dtype: str = "bfloat16") -> dict[str, TensorSpec]:
    """The tensors of K3's vision tower and projector, by checkpoint name."""
    d, merged = v.vt_hidden_size, v.vt_hidden_size * v.merge_kernel_size[0] * v.merge_kernel_size[1]
    tower: dict[str, tuple[int, ...]] = {
        "patch_embed.proj.weight": (d, 3, v.patch_size, v.patch_size),
        "patch_embed.pos_emb.weight": (v.init_pos_emb_height, v.init_pos_emb_width, d),
    }
    for block in range(v.vt_num_hidden_layers):
        tower |= {f"encoder.blocks.{block}.{name}.weight": shape for name, shape in {
            "norm0": (d,), "norm1": (d,), "wqkv": (3 * v.qkv_hidden_size, d), "wo": (d, v.qkv_hidden_size),
            "mlp.fc0": (v.vt_intermediate_size, d), "mlp.fc1": (d, v.vt_intermediate_size),
        }.items()}
    tower["encoder.final_layernorm.weight"] = (d,)
    projector: dict[str, tuple[int, ...]] = {
        "proj.0.weight": (merged, merged), "proj.2.weight": (v.text_hidden_size, merged),
        "post_norm.weight": (v.text_hidden_size,),
    }
    specs = [TensorSpec(f"vision_tower.{name}", shape, dtype, "vision_tower") for name, shape in tower.items()]
    specs += [TensorSpec(f"mm_projector.{name}", shape, dtype, "mm_projector") for name, shape in projector.items()]
    return {spec.name: spec for spec in specs}


def _specs(c: TextConfig) -> Iterator[TensorSpec]:
    d, model = c.hidden_size, c.dtype
    yield TensorSpec("model.embed_tokens.weight", (c.vocab_size, d), model, "embeddings")
    for layer in range(c.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield TensorSpec(f"{prefix}{name}.weight", (d,), model, "norms_attn_res")
        if c.attn_res_block_size is not None:
            yield from _mixture(f"{prefix}self_attention_res", c)
            yield from _mixture(f"{prefix}mlp_res", c)
        yield from _mla(c, prefix) if layer in c.mla_layers else _kda(c, prefix)
        if layer in c.moe_layers:
            yield from _moe(c, prefix + "block_sparse_moe.")
        else:
            yield from _mlp(prefix + "mlp.", d, c.intermediate_size, model, "dense_mlp")
    yield TensorSpec("model.norm.weight", (d,), model, "norms_attn_res")
    if c.attn_res_block_size is not None:
        yield from _mixture("model.output_attn_res", c)
    yield TensorSpec("lm_head.weight", (c.vocab_size, d), model, "embeddings")


def _mixture(site: str, c: TextConfig) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{site}_norm.weight", (c.hidden_size,), c.dtype, "norms_attn_res")
    yield TensorSpec(f"{site}_proj.weight", (1, c.hidden_size), c.dtype, "norms_attn_res")


def _kda(c: TextConfig, prefix: str) -> Iterator[TensorSpec]:
    linear, d = c.linear_attn_config, c.hidden_size
    width, dim, prefix = linear.width, linear.head_dim, prefix + "self_attn."
    shapes: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (width, d), "k_proj.weight": (width, d), "v_proj.weight": (width, d),
        "f_a_proj.weight": (dim, d), "f_b_proj.weight": (width, dim), "b_proj.weight": (linear.num_heads, d),
        "o_proj.weight": (d, width),
    }
    if linear.use_full_rank_gate:
        shapes["g_proj.weight"] = (width, d)
    else:
        shapes |= {"g_a_proj.weight": (dim, d), "g_b_proj.weight": (width, dim)}
    for name, shape in shapes.items():
        yield TensorSpec(prefix + name, shape, c.dtype, "kda")
    conv = (width, 1, linear.short_conv_kernel_size)
    for name in ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight"):
        yield TensorSpec(prefix + name, conv, c.exact_dtype, "kda")
    yield TensorSpec(prefix + "dt_bias", (width,), "float32", "kda")
    yield TensorSpec(prefix + "A_log", a_log_shape(c), "float32", "kda")
    yield TensorSpec(prefix + "o_norm.weight", (dim,), c.exact_dtype, "kda")


def a_log_shape(c: TextConfig) -> tuple[int, ...]:
    """How A_log is stored: K3 [n] with zero padding beyond the heads, Kimi Linear [1, 1, H, 1]."""
    n = c.linear_attn_config.stored_a_log
    return (n,) if c.family == "kimi_k3" else (1, 1, n, 1)


def _mla(c: TextConfig, prefix: str) -> Iterator[TensorSpec]:
    d, heads, prefix = c.hidden_size, c.num_attention_heads, prefix + "self_attn."
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj_with_mqa.weight": (c.kv_lora_rank + c.qk_rope_head_dim, d),
        "kv_a_layernorm.weight": (c.kv_lora_rank,),
        "kv_b_proj.weight": (heads * (c.qk_nope_head_dim + c.v_head_dim), c.kv_lora_rank),
        "o_proj.weight": (d, heads * c.v_head_dim),
    }
    if c.mla_use_output_gate:
        shapes["g_proj.weight"] = (heads * c.v_head_dim, d)
    if c.q_lora_rank is None:
        shapes["q_proj.weight"] = (heads * c.qk_head_dim, d)
    else:
        shapes |= {"q_a_proj.weight": (c.q_lora_rank, d), "q_a_layernorm.weight": (c.q_lora_rank,),
                   "q_b_proj.weight": (heads * c.qk_head_dim, c.q_lora_rank)}
    for name, shape in shapes.items():
        yield TensorSpec(prefix + name, shape, c.dtype, "mla")


def _mlp(prefix: str, width: int, inner: int, dtype: str, component: str) -> Iterator[TensorSpec]:
    yield TensorSpec(prefix + "gate_proj.weight", (inner, width), dtype, component)
    yield TensorSpec(prefix + "up_proj.weight", (inner, width), dtype, component)
    yield TensorSpec(prefix + "down_proj.weight", (width, inner), dtype, component)


def _moe(c: TextConfig, prefix: str) -> Iterator[TensorSpec]:
    d, latent, inner, experts = c.hidden_size, c.expert_width, c.moe_intermediate_size, c.num_experts
    yield TensorSpec(prefix + "gate.weight", (experts, d), c.dtype, "routers")
    yield TensorSpec(prefix + "gate.e_score_correction_bias", (experts,), c.exact_dtype, "routers")
    if c.routed_expert_hidden_size is not None:
        yield TensorSpec(prefix + "routed_expert_down_proj.weight", (latent, d), c.dtype, "latent_projections")
        yield TensorSpec(prefix + "routed_expert_up_proj.weight", (d, latent), c.dtype, "latent_projections")
    if c.latent_moe_use_norm:
        yield TensorSpec(prefix + "routed_expert_norm.weight", (latent,), c.dtype, "latent_projections")
    for name, shape in (("w1", (inner, latent)), ("w2", (latent, inner)), ("w3", (inner, latent))):
        yield TensorSpec(f"{prefix}experts.{name}", (experts, *shape), c.dtype, "routed_experts")
    yield from _mlp(prefix + "shared_experts.", d, c.shared_intermediate_size, c.dtype, "shared_experts")
