"""The architecture as data: frozen dataclasses with the nesting and key names of the released config.json files.

Two families: Kimi K3 (`model_type: kimi_k3`, the text model nested in `text_config`, a vision tower beside it) and Kimi
Linear (`model_type: kimi_linear`, flat). A key or value that would mean another architecture is refused with a remedy.
Sizes that follow from the configuration are properties here or counts in tidemill.model.inventory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch

from tidemill.core.config import parse_config, replace, require, require_positive, strict_config
from tidemill.core.digests import digest_json
from tidemill.core.errors import ConfigError
from tidemill.core.files import write_json
from tidemill.kernels.situ import GluAct
from tidemill.model.hub import model_auto_map, write_model_modules

if TYPE_CHECKING:
    from tidemill.model.chat.control import ControlIds

Family = Literal["kimi_k3", "kimi_linear"]
ACTIVATIONS = ("situ", "silu")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_MXFP4_BLOCK = 32

_QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True,
                        "dynamic": False, "scale_dtype": "torch.uint8", "observer": "minmax", "actorder": None,
                        "zp_dtype": None},
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
               "re:.*lm_head.*"],
    "kv_cache_scheme": None,
}

_NO_EFFECT = frozenset({
    # Keys that Hugging Face writes into every config.json and that change nothing in this model.
    "_name_or_path", "add_cross_attention", "architectures", "auto_map", "bad_words_ids", "begin_suppress_tokens",
    "chunk_size_feed_forward", "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty",
    "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder", "is_encoder_decoder",
    "label2id", "length_penalty", "max_length", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores", "prefix", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript", "torch_dtype",
    "transformers_version", "typical_p", "use_bfloat16", "use_cache", "_attn_implementation", "attention_dropout",
    "num_nextn_predict_layers", "ignore_index", "image_placeholder", "model_type", "head_dim", "rope_theta",
    "rope_parameters", "output_router_logits", "router_aux_loss_coef", "layer_types",
})
"""Positions are never rotated (`mla_use_nope`), so that the constants of rotation mean nothing either."""
_IGNORE_INDEX, _IMAGE_PLACEHOLDER = -100, "<|kimi_image_placeholder|>"


@strict_config
@dataclass(frozen=True, kw_only=True)
class LinearAttnConfig:
    """The KDA layers and which layers are which. Layer numbers in this configuration are **1-based**, as in K3's
    file."""

    num_heads: int
    head_dim: int
    """Key and value width of a head."""
    full_attn_layers: tuple[int, ...]
    """1-based numbers of the MLA layers."""
    kda_layers: tuple[int, ...]
    """1-based numbers of the KDA layers; with `full_attn_layers` exactly 1..num_hidden_layers."""
    short_conv_kernel_size: int = 4
    gate_lower_bound: float | None = None
    """K3: -5.0. Chooses the bounded decay; None is the unbounded softplus form."""
    use_full_rank_gate: bool = False
    """K3: true, one g_proj. Kimi Linear: false, the output gate is g_b_proj(g_a_proj(x)) of rank head_dim."""
    a_log_size: int | None = None
    """Entries of the stored A_log; what lies beyond num_heads is zero padding. None: as released, which is
    max(num_heads, head_dim) for the bounded decay (K3: 96 heads, 128 entries) and num_heads otherwise."""

    def __post_init__(self) -> None:
        require_positive(self, "num_heads", "head_dim", prefix="linear_attn_config.")
        require(self.short_conv_kernel_size == 4, field="linear_attn_config.short_conv_kernel_size",
                value=self.short_conv_kernel_size, expected="4, the only width implemented")
        bound = self.gate_lower_bound
        require(bound is None or -5.0 <= bound < 0.0, field="linear_attn_config.gate_lower_bound", value=bound,
                expected="a number in [-5, 0) (chunks of 16 must fit fp32) or null")
        require(self.a_log_size is None or self.a_log_size >= self.num_heads, field="linear_attn_config.a_log_size",
                value=self.a_log_size, expected=f"at least num_heads = {self.num_heads}, or null")

    @property
    def width(self) -> int:
        """num_heads · head_dim."""
        return self.num_heads * self.head_dim

    @property
    def stored_a_log(self) -> int:
        if self.a_log_size is not None:
            return self.a_log_size
        return self.num_heads if self.gate_lower_bound is None else max(self.num_heads, self.head_dim)


@strict_config
@dataclass(frozen=True, kw_only=True)
class TextConfig:
    """The text model. Field names are the released ones; `family` and `mla_latent_norm_eps` are ours."""

    family: Family = "kimi_k3"
    """Which released file this is the configuration of; decides its nesting and which tensors are kept in fp32."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    """Width of the dense feed-forward block."""
    num_hidden_layers: int
    num_attention_heads: int
    """MLA heads."""
    q_lora_rank: int | None = None
    """Width of the query latent; None: one q_proj without a latent."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    """Width of the shared key part; never rotated in this architecture."""
    v_head_dim: int
    linear_attn_config: LinearAttnConfig
    attn_res_block_size: int | None = None
    """Transformer layers per attention-residual block; None: an ordinary residual stream."""
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    routed_expert_hidden_size: int | None = None
    """Latent width the routed experts work in; None: they work at hidden_size, without projections around them."""
    num_shared_experts: int = 1
    hidden_act: str = "situ"
    """`situ` (K3), or `silu` for SwiGLU."""
    activation_situ_beta: float = 1.0
    activation_situ_linear_beta: float | None = None
    rms_norm_eps: float = 1e-5
    mla_latent_norm_eps: float = 1e-6
    """eps of the two MLA latent norms; the released reference uses its class default 1e-6, our own presets 1e-5."""
    initializer_range: float = 0.02
    """Standard deviation of freshly initialised linear maps and embeddings."""
    max_position_embeddings: int = 1_048_576
    mla_use_nope: bool = True
    mla_use_output_gate: bool = False
    latent_moe_use_norm: bool = False
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    moe_router_activation_func: str = "sigmoid"
    moe_renormalize: bool = True
    routed_scaling_factor: float = 1.0
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    bos_token_id: int | None = None
    eos_token_id: int | None = None
    pad_token_id: int | None = None
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    """Parameter and activation dtype; reductions, router, gates and KDA state are fp32 always."""
    quantize_experts: bool = True
    """Routed experts are stored as MXFP4 (config.json: `quantization_config` is present)."""

    def __post_init__(self) -> None:
        optional = ("activation_situ_linear_beta", "q_lora_rank", "attn_res_block_size", "routed_expert_hidden_size")
        require_positive(
            self, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "num_experts",
            "num_experts_per_token", "moe_intermediate_size", "num_shared_experts", "max_position_embeddings",
            "activation_situ_beta", "rms_norm_eps", "mla_latent_norm_eps", "initializer_range",
            "routed_scaling_factor", *(name for name in optional if getattr(self, name) is not None))
        require(self.dtype in DTYPES, field="dtype", value=self.dtype, expected="'float32' or 'bfloat16'")
        self._check_layers()
        self._check_architecture()
        self._check_experts()
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            require(value is None or 0 <= value < self.vocab_size, field=name, value=value,
                    expected=f"an id below vocab_size = {self.vocab_size}, or null")

    def _check_layers(self) -> None:
        full, kda = self.linear_attn_config.full_attn_layers, self.linear_attn_config.kda_layers
        layers = range(1, self.num_hidden_layers + 1)
        both = sorted(set(full) & set(kda))
        require(not both, field="linear_attn_config.kda_layers", value=list(kda),
                expected=f"no layer that full_attn_layers lists too (both list {both})")
        listed = sorted([*full, *kda])
        missing = [layer for layer in layers if layer not in listed]
        require(listed == list(layers), field="linear_attn_config.full_attn_layers", value=list(full),
                expected=f"together with kda_layers every layer of 1..{self.num_hidden_layers} once (1-based; "
                         f"missing {missing}, unknown or repeated "
                         f"{[layer for layer in listed if layer not in layers or listed.count(layer) > 1]})")

    def _check_architecture(self) -> None:
        require(self.hidden_act in ACTIVATIONS, field="hidden_act", value=self.hidden_act,
                expected=f"one of {', '.join(ACTIVATIONS)}")
        fixed = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc",
                 "moe_layer_freq": 1, "num_expert_group": 1, "topk_group": 1, "tie_word_embeddings": False}
        for name, wanted in fixed.items():
            value = getattr(self, name)
            require(value == wanted, field=name, value=value, expected=f"{wanted!r}, the only form of both families")
        if self.latent_moe_use_norm:
            require(self.routed_expert_hidden_size is not None, field="latent_moe_use_norm", value=True,
                    expected="false, as there is no latent (routed_expert_hidden_size is null)")
        if self.family == "kimi_linear":
            absent = {"hidden_act": "silu", "mla_use_output_gate": False, "attn_res_block_size": None,
                      "routed_expert_hidden_size": None}
            for name, wanted in absent.items():
                value = getattr(self, name)
                require(value == wanted, field=name, value=value,
                        expected=f"{wanted!r} in a flat Kimi-Linear file; K3's mechanisms stand in a nested "
                                 "config.json of model_type kimi_k3")

    def _check_experts(self) -> None:
        require(self.num_experts_per_token < self.num_experts, field="num_experts_per_token",
                value=self.num_experts_per_token, expected=f"less than num_experts = {self.num_experts}")
        require(0 <= self.first_k_dense_replace <= self.num_hidden_layers, field="first_k_dense_replace",
                value=self.first_k_dense_replace, expected=f"a number of layers in 0..{self.num_hidden_layers}")
        if self.quantize_experts:
            latent = "hidden_size" if self.routed_expert_hidden_size is None else "routed_expert_hidden_size"
            for name in (latent, "moe_intermediate_size"):
                value = getattr(self, name)
                require(value % _MXFP4_BLOCK == 0, field=name, value=value,
                        expected=f"a multiple of {_MXFP4_BLOCK}, the MXFP4 block, or quantize_experts: false")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def exact_dtype(self) -> str:
        """Stored dtype of convolutions, output norm and selection bias: fp32 in K3, the model's in Kimi Linear."""
        return "float32" if self.family == "kimi_k3" else self.dtype

    @property
    def glu_act(self) -> GluAct:
        """The activation of every feed-forward block, for the kernels."""
        if self.hidden_act == "silu":
            return GluAct()
        return GluAct(self.activation_situ_beta, self.activation_situ_linear_beta)

    @property
    def expert_width(self) -> int:
        """Width the routed experts read and write."""
        return self.hidden_size if self.routed_expert_hidden_size is None else self.routed_expert_hidden_size

    def starts_block(self, layer: int) -> bool:
        """Whether 0-based `layer` begins an attention-residual block."""
        return self.attn_res_block_size is not None and layer % self.attn_res_block_size == 0

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def mla_scale(self) -> float:
        """Factor on attention scores, (nope + pe)^-1/2."""
        return self.qk_head_dim**-0.5

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.moe_intermediate_size

    @property
    def mla_layers(self) -> tuple[int, ...]:
        """0-based indices of MLA layers, ascending."""
        return tuple(sorted(layer - 1 for layer in self.linear_attn_config.full_attn_layers))

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """0-based indices of KDA layers, ascending."""
        return tuple(sorted(layer - 1 for layer in self.linear_attn_config.kda_layers))

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """0-based indices of layers with routed experts; the others are dense."""
        return tuple(range(self.first_k_dense_replace, self.num_hidden_layers))

    @property
    def num_bank_rows(self) -> int:
        """Rows the attention-residual bank ends with: the embedding and every finished block. 0: no such bank."""
        return 0 if self.attn_res_block_size is None else -(-self.num_hidden_layers // self.attn_res_block_size)

    @property
    def kda_state_bytes(self) -> int:
        """fp32 recurrent state of one sequence over all KDA layers."""
        linear = self.linear_attn_config
        return len(self.kda_layers) * linear.num_heads * linear.head_dim**2 * 4

    @property
    def conv_state_bytes(self) -> int:
        """Last three inputs of q, k, v of one sequence over all KDA layers, in the model's dtype."""
        return len(self.kda_layers) * 3 * 3 * self.linear_attn_config.width * self.torch_dtype.itemsize

    @property
    def state_bytes_per_sequence(self) -> int:
        """What a sequence costs whatever its length."""
        return self.kda_state_bytes + self.conv_state_bytes

    @property
    def mla_bytes_per_token(self) -> int:
        """Cached latents of one token over all MLA layers, in the model's dtype."""
        return len(self.mla_layers) * (self.kv_lora_rank + self.qk_rope_head_dim) * self.torch_dtype.itemsize


@strict_config
@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """K3's vision tower and projector, for names, shapes and counts; nothing here computes them."""

    patch_size: int = 14
    init_pos_emb_height: int = 64
    init_pos_emb_width: int = 64
    init_pos_emb_time: int = 4
    pos_emb_type: str = "divided_fixed"
    pos_emb_interpolation_mode: str = "bilinear"
    vt_hidden_size: int = 1024
    qkv_hidden_size: int = 1536
    vt_num_attention_heads: int = 12
    vt_num_hidden_layers: int = 27
    vt_intermediate_size: int = 4096
    norm_type: str = "rmsnorm"
    attn_bias: bool = False
    linear_bias: bool = False
    patch_embed_proj_bias: bool = False
    mlp_type: str = "mlp2"
    activation_func: str = "gelu_pytorch_tanh"
    merge_kernel_size: tuple[int, int] = (2, 2)
    merge_type: str = "sd2_tpool"
    mm_projector_type: str = "patchmergerv2"
    mm_hidden_size: int = 1024
    text_hidden_size: int = 7168
    projector_hidden_act: str = "gelu"
    projector_ln_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("attn_bias", "linear_bias", "patch_embed_proj_bias"):
            require(not getattr(self, name), field=f"vision_config.{name}", value=True, expected="false, as released")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model folder's config.json."""

    text_config: TextConfig
    vision_config: VisionConfig | None = None
    """None: a text-only model, which is all that computes here."""
    media_placeholder_token_id: int | None = None

    def __post_init__(self) -> None:
        require(self.vision_config is None or self.family == "kimi_k3", field="vision_config", value="present",
                expected="nothing: Kimi Linear has no vision tower")

    @property
    def family(self) -> Family:
        return self.text_config.family

    def with_control(self, control: ControlIds) -> ModelConfig:
        """The same with a tokenizer's ids for begin, end of turn and padding."""
        text = replace(self.text_config, bos_token_id=control.bos, eos_token_id=control.end_of_msg,
                       pad_token_id=control.pad)
        return replace(self, text_config=text)

    def to_json(self) -> dict[str, Any]:
        """The mapping of config.json."""
        text = asdict(self.text_config)
        quantized, family = text.pop("quantize_experts"), text.pop("family")
        text["num_key_value_heads"] = self.text_config.num_attention_heads
        for name in ("full_attn_layers", "kda_layers"):
            text["linear_attn_config"][name] = list(text["linear_attn_config"][name])
        text |= {"architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear"}
        if quantized:
            text["quantization_config"] = _QUANTIZATION
        if family == "kimi_linear":
            return text
        shared = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "tie_word_embeddings")
        top = {name: text[name] for name in shared}
        if self.vision_config is not None:
            top |= {"ignore_index": _IGNORE_INDEX, "image_placeholder": _IMAGE_PLACEHOLDER,
                    "media_placeholder_token_id": self.media_placeholder_token_id,
                    "vision_config": asdict(self.vision_config) | {
                        "merge_kernel_size": list(self.vision_config.merge_kernel_size)}}
        return {"architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", **top,
                "text_config": text}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], *, source: str = "config.json") -> ModelConfig:
        """Parse the mapping of a config.json. ConfigError names the file, the field, its value and what is
        expected."""
        kind = data.get("model_type", "kimi_k3" if "text_config" in data else None)
        if kind == "kimi_linear" and "text_config" not in data:
            return cls(text_config=_text(data, "kimi_linear", source))
        require(kind == "kimi_k3", field=f"{source}: model_type", value=kind,
                expected="'kimi_k3' (nested) or 'kimi_linear' (flat); other families are not implemented")
        text = data.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(f"{source}: text_config is missing", field="text_config",
                              remedy="Expected K3's nested config.json (model_type kimi_k3).")
        allowed = {"text_config", "vision_config", "media_placeholder_token_id", "dtype", "bos_token_id",
                   "eos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config"}
        unknown = sorted(set(data) - allowed - _NO_EFFECT)
        if unknown:
            raise ConfigError(f"{source}: {unknown[0]}: unknown key", field=unknown[0])
        fields = dict(cast("Mapping[str, Any]", text))
        if "dtype" in data:
            fields.setdefault("dtype", data["dtype"])
        vision = data.get("vision_config")
        return cls(
            text_config=_text(fields, "kimi_k3", f"{source}: text_config"),
            vision_config=None if vision is None else parse_config(
                VisionConfig, {k: v for k, v in vision.items() if k not in _NO_EFFECT},
                source=f"{source}: vision_config"),
            media_placeholder_token_id=data.get("media_placeholder_token_id"),
        )

    @classmethod
    def read(cls, folder: Path) -> ModelConfig:
        """Read folder/config.json. ConfigError if it is missing or not JSON."""
        path = folder / "config.json"
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except OSError as e:
            raise ConfigError(f"cannot read {path}: {e.strerror}", field=str(path)) from e
        except ValueError as e:
            raise ConfigError(f"{path} is not valid JSON: {e}", field=str(path)) from e
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: the top level is a {type(data).__name__}, expected a mapping", field=str(path))
        return cls.from_json(cast("dict[str, Any]", data), source=str(path))

    def write(self, folder: Path) -> None:
        """Write folder/config.json atomically, with what Hugging Face's Auto classes look for (tidemill.model.hub)."""
        write_model_modules(folder, self.text_config.family)
        write_json(folder / "config.json", self.to_json() | {"auto_map": model_auto_map(self.text_config.family)})

    @property
    def digest(self) -> str:
        """Digest of the canonical config.json."""
        return digest_json(self.to_json())


def _text(data: Mapping[str, Any], family: Family, source: str) -> TextConfig:
    """The text model of one mapping, with what an absent key means."""
    fields = {k: v for k, v in data.items() if k not in _NO_EFFECT}
    kv_heads = fields.pop("num_key_value_heads", None)
    require(kv_heads in (None, fields.get("num_attention_heads")), field=f"{source}: num_key_value_heads",
            value=kv_heads, expected="the same number as num_attention_heads, or nothing")
    scaling = fields.pop("rope_scaling", None)
    require(scaling is None, field=f"{source}: rope_scaling", value=scaling, expected="null: positions are not rotated")
    if "model_max_length" in fields:
        fields.setdefault("max_position_embeddings", fields.pop("model_max_length"))
    quantization = fields.pop("quantization_config", None)
    _check_quantization(quantization, source)
    fields |= {"family": family, "quantize_experts": quantization is not None}
    fields["activation_situ_beta"] = fields.get("activation_situ_beta") or 1.0
    fields["activation_situ_linear_beta"] = fields.get("activation_situ_linear_beta") or None
    if family == "kimi_linear":
        fields.setdefault("hidden_act", "silu")
    return parse_config(TextConfig, fields, source=source)


def _check_quantization(found: Any, source: str) -> None:
    if found is None:
        return
    wanted = _QUANTIZATION["format"]
    form = found.get("format") if isinstance(found, Mapping) else found
    require(form == wanted, field=f"{source}: quantization_config.format", value=form,
            expected=f"{wanted!r}, the only packed format implemented")
