"""Our own configurations and the released ones. `toy` is what the RL demonstration trains, `tiny` is for tests.

All of ours use eps 1e-5 everywhere, and fp32 up to `small` (most CPUs have no fast bf16). `toy` keeps K3's initialiser.
On a copying task (one seed, one learning rate) the loss was 0.04 after 100 steps with 0.02, as with 0.01; 0.04 stood at
0.97 then, 0.08 at 2.06 and 0.125 at 2.15. A hint, not a study.
`tiny` starts at 0.08, so that untrained logits are far from uniform and tests see every mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tidemill.model.config import LinearAttnConfig, ModelConfig, TextConfig, VisionConfig


def toy(vocab_size: int, *, pad_token_id: int | None = None, dtype: str = "float32") -> ModelConfig:
    """About 0.36 M parameters: 4 layers (three KDA, one MLA), 8 experts top 2, two residual blocks, the last one
    partial."""
    return ModelConfig(text_config=TextConfig(
        vocab_size=vocab_size, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=2,
        q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=32,
        linear_attn_config=LinearAttnConfig(
            num_heads=2, head_dim=32, full_attn_layers=(4,), kda_layers=(1, 2, 3), gate_lower_bound=-5.0,
            use_full_rank_gate=True,
        ),
        attn_res_block_size=3, num_experts=8, num_experts_per_token=2, moe_intermediate_size=64,
        routed_expert_hidden_size=32, num_shared_experts=1, activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0, mla_latent_norm_eps=1e-5, initializer_range=0.02,
        max_position_embeddings=4096, mla_use_output_gate=True, latent_moe_use_norm=True, pad_token_id=pad_token_id,
        dtype=dtype,
    ))


def tiny(vocab_size: int = 96, *, dtype: str = "float32") -> ModelConfig:
    """For tests: 7 layers, MLA at 1-based 4 and 7, blocks of 3 layers with a partial last one, odd A_log padding."""
    return ModelConfig(text_config=TextConfig(
        vocab_size=vocab_size, hidden_size=48, intermediate_size=80, num_hidden_layers=7, num_attention_heads=3,
        q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        linear_attn_config=LinearAttnConfig(
            num_heads=3, head_dim=16, full_attn_layers=(4, 7), kda_layers=(1, 2, 3, 5, 6), gate_lower_bound=-5.0,
            use_full_rank_gate=True, a_log_size=5,
        ),
        attn_res_block_size=3, num_experts=8, num_experts_per_token=3, moe_intermediate_size=32,
        routed_expert_hidden_size=32, num_shared_experts=2, activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0, mla_latent_norm_eps=1e-5, initializer_range=0.08,
        max_position_embeddings=1024, mla_use_output_gate=True, latent_moe_use_norm=True, pad_token_id=0, dtype=dtype,
    ))


def nano(vocab_size: int = 2048, *, dtype: str = "float32") -> ModelConfig:
    """The model that ships, about 4 M parameters: every K3 mechanism, and as few operations for a token as that allows,
    since it is trained on CPU cores. Most parameters are experts."""
    return _scaled(vocab_size, dtype, hidden=192, layers=5, block=3, heads=(3, 64), latents=(96, 64),
                   mla_head=(32, 16, 64), dense=384, experts=(32, 2), expert=(64, 96), shared=1, positions=4096)


def mini(vocab_size: int = 8192, *, dtype: str = "float32") -> ModelConfig:
    """About 30 M parameters."""
    return _scaled(vocab_size, dtype, hidden=384, layers=8, block=3, heads=(6, 64), latents=(192, 128),
                   mla_head=(64, 32, 64), dense=1024, experts=(32, 4), expert=(192, 128), shared=1, positions=32_768)


def small(vocab_size: int = 16_384, *, dtype: str = "float32") -> ModelConfig:
    """About 200 M parameters."""
    return _scaled(vocab_size, dtype, hidden=768, layers=12, block=5, heads=(6, 128), latents=(384, 256),
                   mla_head=(128, 64, 128), dense=2048, experts=(64, 6), expert=(384, 192), shared=1,
                   positions=65_536)


def one_billion(vocab_size: int = 32_768, *, dtype: str = "bfloat16") -> ModelConfig:
    """`1b`: about a billion parameters."""
    return _scaled(vocab_size, dtype, hidden=1536, layers=24, block=7, heads=(12, 128), latents=(768, 512),
                   mla_head=(128, 64, 128), dense=4096, experts=(32, 4), expert=(768, 320), shared=1,
                   positions=131_072)


def _scaled(vocab_size: int, dtype: str, *, hidden: int, layers: int, block: int, heads: tuple[int, int],
            latents: tuple[int, int], mla_head: tuple[int, int, int], dense: int, experts: tuple[int, int],
            expert: tuple[int, int], shared: int, positions: int) -> ModelConfig:
    """K3's proportions at another size: every fourth layer and the last are MLA. heads = (number, KDA head_dim),
    latents = (q, kv), mla_head = (nope, pe, v), experts = (number, top k), expert = (latent, inner)."""
    full = tuple(sorted({*range(4, layers + 1, 4), layers}))
    return ModelConfig(text_config=TextConfig(
        vocab_size=vocab_size, hidden_size=hidden, intermediate_size=dense, num_hidden_layers=layers,
        num_attention_heads=heads[0], q_lora_rank=latents[0], kv_lora_rank=latents[1], qk_nope_head_dim=mla_head[0],
        qk_rope_head_dim=mla_head[1], v_head_dim=mla_head[2],
        linear_attn_config=LinearAttnConfig(
            num_heads=heads[0], head_dim=heads[1], full_attn_layers=full,
            kda_layers=tuple(n for n in range(1, layers + 1) if n not in full), gate_lower_bound=-5.0,
            use_full_rank_gate=True,
        ),
        attn_res_block_size=block, num_experts=experts[0], num_experts_per_token=experts[1],
        moe_intermediate_size=expert[1], routed_expert_hidden_size=expert[0], num_shared_experts=shared,
        activation_situ_beta=4.0, activation_situ_linear_beta=25.0, mla_latent_norm_eps=1e-5,
        max_position_embeddings=positions, mla_use_output_gate=True, latent_moe_use_norm=True, dtype=dtype,
    ))


def tiny_linear(vocab_size: int = 96, *, dtype: str = "float32", **changes: Any) -> ModelConfig:
    """For tests: Kimi Linear's mechanisms (unbounded decay, low-rank gate, SwiGLU, plain residual) at toy size."""
    fields = dict[str, Any](
        family="kimi_linear", vocab_size=vocab_size, hidden_size=64, intermediate_size=96, num_hidden_layers=5,
        num_attention_heads=2, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24,
        linear_attn_config=LinearAttnConfig(num_heads=2, head_dim=32, full_attn_layers=(4,),
                                            kda_layers=(1, 2, 3, 5)),
        hidden_act="silu", num_experts=8, num_experts_per_token=3, moe_intermediate_size=32,
        routed_scaling_factor=2.446, mla_latent_norm_eps=1e-5, initializer_range=0.08, max_position_embeddings=1024,
        pad_token_id=0, quantize_experts=False, dtype=dtype,
    )
    return ModelConfig(text_config=TextConfig(**(fields | changes)))


def k3() -> ModelConfig:
    """The released model. For sizes and counts; nothing here could hold its weights."""
    full = (*range(4, 93, 4), 93)
    return ModelConfig(text_config=TextConfig(
        vocab_size=163_840, hidden_size=7168, intermediate_size=33_792, num_hidden_layers=93, num_attention_heads=96,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        linear_attn_config=LinearAttnConfig(
            num_heads=96, head_dim=128, full_attn_layers=full,
            kda_layers=tuple(layer for layer in range(1, 94) if layer not in full), gate_lower_bound=-5.0,
            use_full_rank_gate=True,
        ),
        attn_res_block_size=12, num_experts=896, num_experts_per_token=16, moe_intermediate_size=3072,
        routed_expert_hidden_size=3584, num_shared_experts=2, activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0, mla_use_output_gate=True, latent_moe_use_norm=True, bos_token_id=163_584,
        eos_token_id=163_586, pad_token_id=163_839,
    ), vision_config=VisionConfig(), media_placeholder_token_id=163_605)


def kimi_linear_48b() -> ModelConfig:
    """The released Kimi-Linear-48B-A3B."""
    full = (4, 8, 12, 16, 20, 24, 27)
    return ModelConfig(text_config=TextConfig(
        family="kimi_linear", vocab_size=163_840, hidden_size=2304, intermediate_size=9216, num_hidden_layers=27,
        num_attention_heads=32, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        linear_attn_config=LinearAttnConfig(
            num_heads=32, head_dim=128, full_attn_layers=full,
            kda_layers=tuple(layer for layer in range(1, 28) if layer not in full),
        ),
        hidden_act="silu", num_experts=256, num_experts_per_token=8, moe_intermediate_size=1024,
        routed_scaling_factor=2.446, bos_token_id=163_584, eos_token_id=163_586, pad_token_id=163_839,
        quantize_experts=False,
    ))


BY_VOCABULARY: Mapping[str, Callable[[int], ModelConfig]] = {"toy": toy, "tiny": tiny, "nano": nano, "mini": mini}
"""Presets small enough to be made with random weights at once, by name; each takes the vocabulary size."""

PRESETS: Mapping[str, Callable[[], ModelConfig]] = {
    "nano": nano, "mini": mini, "small": small, "1b": one_billion, "kimi-linear-48b": kimi_linear_48b, "k3": k3,
}
"""Presets with a vocabulary size of their own."""
