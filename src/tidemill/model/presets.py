"""Our own small configurations, and K3's. `toy` is what the RL demonstration trains, `tiny` is for tests.

All of ours use eps 1e-5 everywhere and fp32 (most CPUs have no fast bf16). `toy` keeps K3's initialiser of 0.02.
On a copying task (one seed, one learning rate) the loss was 0.04 after 100 steps with 0.02, as with 0.01; 0.04 stood at
0.97 then, 0.08 at 2.06 and 0.125 at 2.15. A hint, not a study.
`tiny` starts at 0.08, so that untrained logits are far from uniform and tests see every mechanism.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tidemill.model.config import K3Config, LinearAttnConfig, TextConfig


def toy(vocab_size: int, *, pad_token_id: int | None = None, dtype: str = "float32") -> K3Config:
    """About 0.36 M parameters: 4 layers (three KDA, one MLA), 8 experts top 2, two residual blocks, the last one
    partial."""
    return K3Config(text_config=TextConfig(
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


def tiny(vocab_size: int = 96, *, dtype: str = "float32") -> K3Config:
    """For tests: 7 layers, MLA at 1-based 4 and 7, blocks of 3 layers with a partial last one, odd A_log padding."""
    return K3Config(text_config=TextConfig(
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


def k3() -> K3Config:
    """The released text model. For sizes and counts; nothing here could hold its weights."""
    full = (*range(4, 93, 4), 93)
    return K3Config(text_config=TextConfig(
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
    ))


BY_VOCABULARY: Mapping[str, Callable[[int], K3Config]] = {"toy": toy, "tiny": tiny}
"""Presets small enough to be made here, by name; each takes the vocabulary size."""
