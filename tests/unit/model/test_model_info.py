"""Sizes and memory plans: the released model's published numbers, and every split against plain arithmetic."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tidemill.core.errors import ConfigError, IntegrityError
from tidemill.model.base import write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import ModelConfig
from tidemill.model.info import (
    K3_LICENCE,
    KIMI_LINEAR_LICENCE,
    UNKNOWN_LICENCE,
    describe,
    describe_folder,
    folder_licence,
    meta_model,
    preset_licence,
)
from tidemill.model.inventory import inventory
from tidemill.model.names import ExpertForm, file_tensors
from tidemill.model.plan import GIB, gpus_needed, memory_plan
from tidemill.model.presets import k3, kimi_linear_48b, nano, tiny, tiny_linear
from tidemill.model.tensor_bytes import dtype_name


def test_the_released_model_over_meta_modules() -> None:
    found = describe(k3(), licence=preset_licence("k3"))
    assert found.total == 2_779_931_837_184
    assert found.active == 104_189_614_848
    assert found.tensors == 497_220
    assert found.total_bytes == 1_560_860_324_864
    assert found.components["vision_tower"] == 401_214_464
    assert found.components["mm_projector"] == 46_144_512
    assert found.bytes_by_dtype["float32"] == 4 * (69 * (3 * 12288 * 4 + 128 + 12288 + 128) + 92 * 896)
    assert (found.state_bytes_per_sequence, found.cache_bytes_per_token, found.bank_rows) == (449_372_160, 27_648, 8)
    assert found.licence == K3_LICENCE
    for fact in ("separate agreement", "20 million USD", "any 12 months", "100 million monthly", "display the name"):
        assert fact in found.licence


def test_the_released_modules_are_the_inventory_and_its_names() -> None:
    config = k3()
    state, specs = meta_model(config).state_dict(), inventory(config.text_config)
    assert {name: (tuple(x.shape), dtype_name(x.dtype)) for name, x in state.items()} == {
        name: (spec.shape, spec.dtype) for name, spec in specs.items()}
    assert all(x.device.type == "meta" for x in state.values())
    names = file_tensors(config.text_config)
    assert sum(".experts." in name for name in names) == 494_592
    assert names["model.layers.92.block_sparse_moe.experts.895.w2.weight_packed"].shape == (3584, 1536)
    assert names["model.layers.92.block_sparse_moe.experts.895.w2.weight_scale"].shape == (3584, 96)


def test_the_released_kimi_linear() -> None:
    found = describe(kimi_linear_48b(), licence="")
    assert found.total == 49_122_681_728
    assert found.total_bytes == 98_245_528_576
    assert "vision_tower" not in found.components


@pytest.mark.parametrize("config", [tiny(), tiny_linear(dtype="bfloat16")])
def test_a_folder_is_described_by_its_tensors(tmp_path: Path, config: ModelConfig) -> None:
    write_base(tmp_path, CausalLM(config, seed=1), max_shard_bytes=60_000)
    found_config, found = describe_folder(tmp_path)
    assert found_config == config
    assert found == describe(config, licence=UNKNOWN_LICENCE)
    overhead = sum(p.stat().st_size for p in tmp_path.glob("*.safetensors")) - found.total_bytes
    headers = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in tmp_path.glob("*.safetensors"))
    assert overhead == headers
    assert found.tensors == len(file_tensors(config.text_config))


def test_a_configuration_without_weights(tmp_path: Path) -> None:
    kimi_linear_48b().write(tmp_path)
    config, found = describe_folder(tmp_path)
    assert (config, found.total, found.licence) == (kimi_linear_48b(), 49_122_681_728, KIMI_LINEAR_LICENCE)


def test_folders_of_the_released_model_carry_its_licence(tmp_path: Path) -> None:
    assert folder_licence(tmp_path, k3()) == K3_LICENCE
    (tmp_path / "LICENSE").write_text("mine")
    assert folder_licence(tmp_path, nano()) == f"See {tmp_path / 'LICENSE'}."


def test_stacked_experts_are_fewer_tensors_of_the_same_size() -> None:
    config = tiny()
    forms = {spec.name: ExpertForm("stacked", quantized=True)
             for spec in inventory(config.text_config).values() if spec.is_expert}
    one, many = describe(config, licence="", forms=forms), describe(config, licence="")
    assert one.total_bytes == many.total_bytes
    assert many.tensors - one.tensors == len(forms) * 2 * 7


def test_one_accelerator_holds_everything() -> None:
    config = tiny()
    plan = memory_plan(config.text_config, 1, GIB)
    assert (plan.tensor_group, plan.expert_group) == (1, 1)
    total = plan.experts + plan.split + sum(plan.replicated.values())
    assert total == describe(config, licence="").total_bytes
    assert plan.room == GIB - plan.reserve - total
    text = config.text_config
    assert plan.sequences == {1024: plan.room // (text.state_bytes_per_sequence + 1024 * text.mla_bytes_per_token)}
    assert plan.fits


def test_parts_are_split_as_the_layers_split_them() -> None:
    text = k3().text_config
    one, many = memory_plan(text, 1, GIB), memory_plan(text, 32, 192 * GIB)
    assert (many.tensor_group, many.expert_group) == (32, 32)
    assert many.experts * 32 == one.experts == 2_722_740_830_208 * 17 // 32
    assert many.split * 32 == pytest.approx(one.split, abs=32 * 5000)
    assert many.replicated == one.replicated
    assert set(many.replicated) == {"embeddings", "kda", "mla", "latent_projections", "norms_attn_res", "routers"}
    per_layer = 1536 * 7168 + 1536 + 576 * 7168 + 512
    assert many.replicated["mla"] == 24 * per_layer * 2
    assert many.replicated["kda"] == 69 * (128 * 7168 * 2 + 128 * 4 + 128 * 4)
    sequence = text.state_bytes_per_sequence // 32 + 131_072 * text.mla_bytes_per_token
    assert many.sequences[131_072] == many.room // sequence


def test_heads_that_do_not_divide_are_kept_in_several_groups() -> None:
    text = tiny().text_config
    plan = memory_plan(text, 8, GIB)
    assert (plan.tensor_group, plan.expert_group) == (1, 8)
    assert plan.sequences[1024] % 8 == 0


def test_what_does_not_fit_says_how_many_would() -> None:
    text = k3().text_config
    plan = memory_plan(text, 8, 80 * GIB)
    assert not plan.fits
    assert plan.room < 0
    needed = gpus_needed(text, 80 * GIB)
    assert needed is not None
    assert memory_plan(text, needed, 80 * GIB).fits
    assert not any(memory_plan(text, n, 80 * GIB).fits for n in range(needed - 6, needed))
    assert gpus_needed(tiny().text_config, 100_000) is None


def test_sizes_of_accelerators_are_checked() -> None:
    for gpus, memory in ((0, GIB), (1, 0)):
        with pytest.raises(ConfigError):
            memory_plan(tiny().text_config, gpus, memory)


def test_describing_a_folder_reads_headers_only(tmp_path: Path) -> None:
    model = CausalLM(tiny(), seed=1)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = float("nan")
    write_base(tmp_path, model)
    assert describe_folder(tmp_path)[1].tensors
    os.truncate(tmp_path / "model.safetensors", 100_000)
    with pytest.raises(IntegrityError, match="cut short"):
        describe_folder(tmp_path)
