"""Configuration as GGUF metadata and back, for the architectures `kimi-k3` and `kimi-linear` of llama.cpp.

What such a file cannot say is refused on export, by field; what it leaves open gets our defaults on import.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.core.config import require
from tidemill.core.errors import ConfigError, ManifestError
from tidemill.model.config import Family, LinearAttnConfig, ModelConfig, TextConfig
from tidemill.model.gguf.container import GgufFile, TensorKind, Value

ARCHITECTURES: dict[Family, str] = {"kimi_k3": "kimi-k3", "kimi_linear": "kimi-linear"}
_SIGMOID = 2
_FILE_TYPES = {TensorKind.F32: 0, TensorKind.BF16: 32, TensorKind.MXFP4: 38}
_LATENT_EPS = "tidemill.mla_latent_norm_eps"


def file_type(dense: TensorKind, experts: TensorKind) -> int:
    """llama.cpp's `general.file_type`: what most of the bytes are."""
    return _FILE_TYPES[TensorKind.MXFP4 if experts is TensorKind.MXFP4 else dense]


def check_exportable(c: TextConfig) -> None:
    """ConfigError naming the first field that the architecture of llama.cpp has no place for."""
    linear = c.linear_attn_config
    require(linear.num_heads == c.num_attention_heads, field="linear_attn_config.num_heads", value=linear.num_heads,
            expected=f"num_attention_heads = {c.num_attention_heads}: GGUF has one number of heads")
    require(bool(c.kda_layers) and bool(c.mla_layers), field="linear_attn_config.full_attn_layers",
            value=list(linear.full_attn_layers), expected="at least one KDA and one MLA layer: llama.cpp needs both")
    if c.family == "kimi_k3":
        wanted = {"hidden_act": "situ"}
        require(linear.use_full_rank_gate, field="linear_attn_config.use_full_rank_gate", value=False,
                expected="true, the only form of kimi-k3")
    else:
        wanted = {"hidden_act": "silu", "q_lora_rank": None, "moe_renormalize": True}
        require(not linear.use_full_rank_gate, field="linear_attn_config.use_full_rank_gate", value=True,
                expected="false, the only form of kimi-linear")
        require(linear.gate_lower_bound is None, field="linear_attn_config.gate_lower_bound",
                value=linear.gate_lower_bound, expected="null, the only form of kimi-linear")
    for name, value in wanted.items():
        require(getattr(c, name) == value, field=name, value=getattr(c, name),
                expected=f"{value!r}, the only form of {ARCHITECTURES[c.family]} in GGUF")


def to_metadata(config: ModelConfig, name: str, kind: int) -> dict[str, Value]:
    """All keys but the tokenizer's. `kind` is `file_type`."""
    c, arch = config.text_config, ARCHITECTURES[config.family]
    linear = c.linear_attn_config
    keys: dict[str, Value | None] = {
        "block_count": c.num_hidden_layers, "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size, "feed_forward_length": c.intermediate_size, "vocab_size": c.vocab_size,
        "attention.head_count": c.num_attention_heads,
        "attention.head_count_kv": [int(layer in c.mla_layers) for layer in range(c.num_hidden_layers)],
        "attention.layer_norm_rms_epsilon": c.rms_norm_eps, "attention.q_lora_rank": c.q_lora_rank,
        "attention.kv_lora_rank": c.kv_lora_rank, "attention.key_length": c.kv_lora_rank + c.qk_rope_head_dim,
        "attention.value_length": c.kv_lora_rank, "attention.key_length_mla": c.qk_head_dim,
        "attention.value_length_mla": c.v_head_dim, "rope.dimension_count": c.qk_rope_head_dim,
        "ssm.conv_kernel": linear.short_conv_kernel_size, "kda.head_dim": linear.head_dim,
        "kda.gate_lower_bound": linear.gate_lower_bound,
        "expert_count": c.num_experts, "expert_used_count": c.num_experts_per_token,
        "expert_feed_forward_length": c.moe_intermediate_size, "expert_shared_count": c.num_shared_experts,
        "leading_dense_block_count": c.first_k_dense_replace, "expert_weights_scale": float(c.routed_scaling_factor),
        "expert_weights_norm": c.moe_renormalize, "expert_gating_func": _SIGMOID,
        "expert_latent_length": c.routed_expert_hidden_size,
    }
    if c.family == "kimi_k3":
        keys |= {"attn_res.block_size": c.attn_res_block_size or 0,
                 "activation.situ_beta": float(c.activation_situ_beta),
                 "activation.situ_linear_beta": float(c.activation_situ_linear_beta or 0.0)}
    return {
        "general.architecture": arch, "general.type": "model", "general.name": name, "general.file_type": kind,
        "general.quantization_version": 2, _LATENT_EPS: c.mla_latent_norm_eps,
        **{f"{arch}.{key}": value for key, value in keys.items() if value is not None},
    }


class _Keys:
    """Metadata of one architecture, read with a type."""

    def __init__(self, path: Path, metadata: dict[str, Any], arch: str) -> None:
        self._path, self._metadata, self._arch = path, metadata, arch

    def optional(self, key: str, kind: type) -> Any:
        full = f"{self._arch}.{key}"
        value = self._metadata.get(full)
        if value is None:
            return None
        if isinstance(value, list) and kind is int:
            value = value[0] if len(set(value)) == 1 else value
        if kind is float and isinstance(value, float):
            return _shortest(value)
        if type(value) is not kind:
            raise ManifestError(f"{self._path}: {full} = {value!r}: expected one {kind.__name__}")
        return value

    def need(self, key: str, kind: type) -> Any:
        value = self.optional(key, kind)
        if value is None:
            raise ManifestError(f"{self._path}: the key {self._arch}.{key} is missing",
                                remedy="Convert the model with a llama.cpp that knows this architecture.")
        return value

    def cache_heads(self, layers: int) -> list[int]:
        """Cached heads by layer: 0 marks a KDA layer."""
        value = self._metadata.get(f"{self._arch}.attention.head_count_kv")
        if not isinstance(value, list) or len(value) != layers:
            raise ManifestError(f"{self._path}: {self._arch}.attention.head_count_kv = {value!r}: expected one number "
                                f"for each of {layers} layers, 0 for KDA")
        return value


def _shortest(value: float) -> float:
    """The shortest decimal that a 32-bit float came from: 1e-05 and not 9.99999974e-06."""
    return float(f"{value:.7g}")


def from_metadata(file: GgufFile, *, dtype: str, quantized: bool, names: set[str]) -> ModelConfig:
    """The configuration of a file. `names` are its tensors, which decide whether norms and gates that
    may be absent exist. ManifestError naming file and key, or ConfigError naming the field."""
    path, metadata = file.path, file.metadata
    arch = metadata.get("general.architecture")
    families = {name: family for family, name in ARCHITECTURES.items()}
    if arch not in families:
        raise ManifestError(f"{path} has the architecture {arch!r}, expected {' or '.join(families)}",
                            remedy="Only these two can be read back.")
    keys = _Keys(path, metadata, arch)
    layers, pe = keys.need("block_count", int), keys.need("rope.dimension_count", int)
    heads = keys.need("attention.head_count", int)
    cached = keys.cache_heads(layers)
    gating = keys.optional("expert_gating_func", int)
    if gating not in (None, _SIGMOID):
        raise ManifestError(f"{path}: {arch}.expert_gating_func = {gating}: expected {_SIGMOID} (sigmoid)")
    fields: dict[str, Any] = {
        "family": families[arch], "vocab_size": keys.need("vocab_size", int),
        "hidden_size": keys.need("embedding_length", int), "intermediate_size": keys.need("feed_forward_length", int),
        "num_hidden_layers": layers, "num_attention_heads": heads,
        "q_lora_rank": keys.optional("attention.q_lora_rank", int) if _any(names, "attn_q_a.weight") else None,
        "kv_lora_rank": keys.need("attention.kv_lora_rank", int),
        "qk_nope_head_dim": keys.need("attention.key_length_mla", int) - pe, "qk_rope_head_dim": pe,
        "v_head_dim": keys.need("attention.value_length_mla", int),
        "linear_attn_config": LinearAttnConfig(
            num_heads=heads, head_dim=keys.need("kda.head_dim", int),
            full_attn_layers=tuple(i + 1 for i, n in enumerate(cached) if n),
            kda_layers=tuple(i + 1 for i, n in enumerate(cached) if not n),
            short_conv_kernel_size=keys.need("ssm.conv_kernel", int),
            gate_lower_bound=keys.optional("kda.gate_lower_bound", float), use_full_rank_gate=arch == "kimi-k3",
        ),
        "num_experts": keys.need("expert_count", int), "num_experts_per_token": keys.need("expert_used_count", int),
        "moe_intermediate_size": keys.need("expert_feed_forward_length", int),
        "num_shared_experts": keys.need("expert_shared_count", int),
        "first_k_dense_replace": keys.need("leading_dense_block_count", int),
        "routed_scaling_factor": keys.optional("expert_weights_scale", float) or 1.0,
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon", float),
        "max_position_embeddings": keys.need("context_length", int), "dtype": dtype, "quantize_experts": quantized,
    }
    eps = metadata.get(_LATENT_EPS)
    fields["mla_latent_norm_eps"] = _shortest(eps) if isinstance(eps, float) else fields["rms_norm_eps"]
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        fields[f"{ours}_token_id"] = metadata.get(f"tokenizer.ggml.{theirs}_token_id")
    if arch == "kimi-k3":
        fields |= {
            "hidden_act": "situ", "activation_situ_beta": keys.need("activation.situ_beta", float),
            "activation_situ_linear_beta": keys.need("activation.situ_linear_beta", float) or None,
            "attn_res_block_size": keys.need("attn_res.block_size", int) or None,
            "routed_expert_hidden_size": keys.optional("expert_latent_length", int) or None,
            "latent_moe_use_norm": _any(names, "ffn_routed_norm.weight"),
            "mla_use_output_gate": _any(names, "attn_gate.weight"),
            "moe_renormalize": bool(keys.optional("expert_weights_norm", bool)),
        }
    else:
        fields["hidden_act"] = "silu"
    try:
        return ModelConfig(text_config=TextConfig(**fields))
    except ConfigError as e:
        raise ManifestError(f"{path}: {e.message}", remedy=e.remedy) from e


def _any(names: set[str], suffix: str) -> bool:
    return any(name.endswith(suffix) for name in names)
