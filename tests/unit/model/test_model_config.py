"""Configuration: K3's file, round trips, derived sizes, and refusals that name field, value and remedy."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tidemill.core.errors import ConfigError
from tidemill.model.config import ModelConfig
from tidemill.model.inventory import active_parameters, inventory, parameter_counts, total_parameters
from tidemill.model.names import expert_name, file_tensors
from tidemill.model.presets import k3, tiny, toy


def released() -> dict[str, Any]:
    """The text part of the released config.json with the keys it really has."""
    full = [*range(4, 93, 4), 93]
    return {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "dtype": "bfloat16",
        "bos_token_id": 163584, "eos_token_id": 163586, "pad_token_id": 163839, "media_placeholder_token_id": 163605,
        "ignore_index": -100, "tie_word_embeddings": False, "vision_config": {"patch_size": 14},
        "image_placeholder": "<|kimi_image_placeholder|>",
        "auto_map": {"AutoConfig": "configuration_kimi_k3.KimiK3Config"},
        "text_config": {
            "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "vocab_size": 163840,
            "hidden_size": 7168, "intermediate_size": 33792, "num_hidden_layers": 93, "num_attention_heads": 96,
            "num_key_value_heads": 96, "hidden_act": "situ", "activation_situ_beta": 4.0,
            "activation_situ_linear_beta": 25.0, "rms_norm_eps": 1e-5, "initializer_range": 0.02,
            "max_position_embeddings": 1048576, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "mla_use_nope": True, "mla_use_output_gate": True,
            "linear_attn_config": {
                "num_heads": 96, "head_dim": 128, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
                "use_full_rank_gate": True, "full_attn_layers": full,
                "kda_layers": [n for n in range(1, 94) if n not in full],
            },
            "attn_res_block_size": 12, "num_experts": 896, "num_experts_per_token": 16, "num_shared_experts": 2,
            "moe_intermediate_size": 3072, "routed_expert_hidden_size": 3584, "latent_moe_use_norm": True,
            "first_k_dense_replace": 1, "moe_layer_freq": 1, "moe_router_activation_func": "sigmoid",
            "moe_renormalize": True, "routed_scaling_factor": 1.0, "topk_method": "noaux_tc", "use_grouped_topk": True,
            "num_expert_group": 1, "topk_group": 1, "num_nextn_predict_layers": 0, "bos_token_id": 163584,
            "eos_token_id": 163586, "pad_token_id": 163839, "tie_word_embeddings": False, "dtype": "bfloat16",
            "use_cache": True, "transformers_version": "4.56.2", "temperature": 1.0,
            "quantization_config": {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        },
    }


def test_the_released_configuration_is_the_preset() -> None:
    assert ModelConfig.from_json(released()) == k3()


def test_released_parameter_counts_from_shapes_alone() -> None:
    text = k3().text_config
    assert total_parameters(text) == 2_779_484_478_208
    assert active_parameters(text) == 104_189_614_848
    counts = parameter_counts(text)
    assert counts["routed_experts"] == 2_722_740_830_208
    assert counts["kda"] == 30_618_088_704
    assert counts["mla"] == 5_572_706_304
    assert counts["shared_experts"] == 12_155_092_992
    assert counts["latent_projections"] == 4_727_310_336
    assert counts["routers"] == 590_955_008
    assert counts["norms_attn_res"] == 4_021_248


def test_released_cache_sizes() -> None:
    text = k3().text_config
    assert text.kda_state_bytes == 434_110_464
    assert text.state_bytes_per_sequence == 449_372_160
    assert text.mla_bytes_per_token == 27_648
    assert text.num_bank_rows == 8
    assert text.mla_layers[-2:] == (91, 92)
    assert (len(text.mla_layers), len(text.kda_layers), len(text.moe_layers)) == (24, 69, 92)


def test_released_file_bytes() -> None:
    sizes = {"bfloat16": 2, "float32": 4, "uint8": 1}
    # One layer's experts stand for all 92: the names of 494,592 file tensors need not be made to know their size.
    one = toy(64).text_config
    packed = sum(t.part == "packed" for t in file_tensors(one).values())
    assert packed == len(one.moe_layers) * one.num_experts * 3
    total = 0
    for spec in inventory(k3().text_config).values():
        total += spec.numel // 2 + spec.numel // 32 if spec.is_expert else spec.numel * sizes[spec.dtype]
    vision = 2 * (401_214_464 + 46_144_512)
    assert total + vision == 1_560_860_324_864


@pytest.mark.parametrize("config", [toy(300), tiny(), k3(), tiny(dtype="bfloat16")])
def test_round_trip(config: ModelConfig, tmp_path: Path) -> None:
    config.write(tmp_path)
    assert ModelConfig.read(tmp_path) == config
    assert ModelConfig.read(tmp_path).digest == config.digest


def test_presets_have_the_shape_they_promise() -> None:
    small = toy(256).text_config
    assert 250_000 < total_parameters(small) < 500_000
    assert small.num_bank_rows == 2
    assert small.num_hidden_layers % small.attn_res_block_size != 0
    test = tiny().text_config
    assert test.linear_attn_config.stored_a_log != test.linear_attn_config.num_heads
    for config in (small, test):
        assert config.rms_norm_eps == config.mla_latent_norm_eps == 1e-5


def test_absent_keys_get_their_defaults() -> None:
    data = toy(64).to_json()
    for key in ("activation_situ_beta", "activation_situ_linear_beta", "num_expert_group", "topk_group",
                "moe_layer_freq", "mla_latent_norm_eps", "quantization_config"):
        del data["text_config"][key]
    text = ModelConfig.from_json(data).text_config
    assert text.activation_situ_beta == 1.0
    assert text.activation_situ_linear_beta is None
    assert text.mla_latent_norm_eps == 1e-6
    assert not text.quantize_experts
    data["text_config"]["activation_situ_beta"] = 0
    assert ModelConfig.from_json(data).text_config.activation_situ_beta == 1.0


BAD = [
    ("hidden_size", 0, "above 0"),
    ("num_experts", -8, "above 0"),
    ("vocab_size", "many", "vocab_size"),
    ("num_experts_per_token", 8, "less than num_experts"),
    ("moe_intermediate_size", 40, "multiple of 32"),
    ("routed_expert_hidden_size", 48, "multiple of 32"),
    ("hidden_act", "gelu", "situ, silu"),
    ("dtype", "float8", "'bfloat16'"),
    ("num_key_value_heads", 1, "num_attention_heads"),
    ("pad_token_id", 64, "below vocab_size"),
    ("rms_norm_eps", 0.0, "above 0"),
    ("first_k_dense_replace", 9, "0..4"),
    ("tie_word_embeddings", True, "False"),
    ("num_expert_group", 2, "1"),
    ("no_such_key", 1, "unknown key"),
    ("linear_attn_config.head_dim", 0, "above 0"),
    ("linear_attn_config.gate_lower_bound", -6.0, "[-5, 0)"),
    ("linear_attn_config.short_conv_kernel_size", 3, "4"),
    ("linear_attn_config.a_log_size", 1, "at least num_heads"),
    ("linear_attn_config.full_attn_layers", [3], "both list [3]"),
    ("linear_attn_config.full_attn_layers", [], "missing [4]"),
    ("linear_attn_config.full_attn_layers", [4, 5], "unknown or repeated [5]"),
    ("quantization_config", {"format": "nvfp4"}, "mxfp4-pack-quantized"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD)
def test_refusals_name_field_value_and_remedy(key: str, value: object, message: str) -> None:
    data = copy.deepcopy(toy(64).to_json())
    node = data["text_config"]
    *parents, leaf = key.split(".")
    for parent in parents:
        node = node[parent]
    node[leaf] = value
    with pytest.raises(ConfigError) as e:
        ModelConfig.from_json(data)
    assert leaf in str(e.value)
    assert message in str(e.value)


def test_bad_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="mapping"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 64}))
    with pytest.raises(ConfigError, match="model_type"):
        ModelConfig.read(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(toy(64).to_json() | {"surprise": 1}))
    with pytest.raises(ConfigError, match="surprise"):
        ModelConfig.read(tmp_path)


def test_expert_names() -> None:
    stack = "model.layers.1.block_sparse_moe.experts.w1"
    assert expert_name(stack, 3, "weight_packed") == "model.layers.1.block_sparse_moe.experts.3.w1.weight_packed"
    with pytest.raises(ValueError, match="no"):
        expert_name("model.norm.weight", 0, "weight")
    names = file_tensors(tiny().text_config)
    packed = names["model.layers.1.block_sparse_moe.experts.7.w2.weight_packed"]
    assert (packed.shape, packed.dtype, packed.stacked) == ((32, 16), "uint8", stack[:-1] + "2")
