"""Adapters in PEFT's layouts: written, read back, merged; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidemill.core.errors import InputError, IntegrityError, ManifestError
from tidemill.model import lora
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import ModelConfig
from tidemill.model.lora import LoraConfig
from tidemill.model.peft_files import CONFIG, WEIGHTS, write_adapter
from tidemill.model.peft_layouts import PeftLayout, merge, merge_into, read_peft, write_peft
from tidemill.model.presets import tiny, tiny_linear

LORA = LoraConfig(rank=4, alpha=8.0)
MOE = "model.layers.2.block_sparse_moe."
LAYOUTS: tuple[PeftLayout, ...] = ("per-expert", "target_parameters")
Tensors = dict[str, Tensor]


def plain(dtype: str = "float32") -> ModelConfig:
    config = tiny(dtype=dtype)
    return replace(config, text_config=replace(config.text_config, quantize_experts=False))


def trained(model: CausalLM, config: LoraConfig = LORA) -> Tensors:
    generator = torch.Generator().manual_seed(8)
    for p in lora.attach(model, config, seed=5):
        p.data.add_(0.1 * torch.randn(p.shape, generator=generator))
    return {k: v.clone() for k, v in lora.export_adapter(model, config).items()}


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("config", [plain(), tiny_linear()])
def test_a_written_adapter_is_read_back(tmp_path: Path, layout: PeftLayout, config: ModelConfig) -> None:
    tensors = trained(CausalLM(config, seed=1))
    write_peft(tmp_path, config.text_config, LORA, tensors, layout)
    found, back = read_peft(tmp_path, config.text_config).shared(config.text_config)
    groups = {site.group for site in lora.sites(config.text_config, LORA)}
    assert (found.rank, found.alpha, set(found.targets)) == (LORA.rank, LORA.alpha, groups)
    assert set(back) == set(tensors)
    for name, x in tensors.items():
        assert torch.equal(back[name], x), name


def test_our_own_files_are_read_too(tmp_path: Path) -> None:
    model = CausalLM(plain(), seed=1)
    tensors = trained(model)
    manifest = lora.build_manifest(tensors, version=1, base_digest="b", config_digest=LORA.digest, created_step=0)
    write_adapter(tmp_path, LORA, tensors, manifest)
    _, back = read_peft(tmp_path, plain().text_config).shared(plain().text_config)
    assert all(torch.equal(back[name], x) for name, x in tensors.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_names_shapes_and_configuration_are_pefts(tmp_path: Path, layout: PeftLayout) -> None:
    tensors = trained(CausalLM(plain(), seed=1))
    write_peft(tmp_path, plain().text_config, LORA, tensors, layout)
    stored, config = load_file(tmp_path / WEIGHTS), json.loads((tmp_path / CONFIG).read_text())
    assert all(name.startswith("base_model.model.model.layers.") for name in stored)
    experts = "base_model.model." + MOE + "experts"
    b = tensors[MOE + "experts.w3.lora_B.weight"]
    if layout == "per-expert":
        assert config["target_modules"].count("w3") == 1
        assert "target_parameters" not in config
        assert torch.equal(stored[f"{experts}.5.w3.lora_B.weight"], b[5])
        assert stored[f"{experts}.5.w2.lora_A.weight"].shape == (4, 32)
        assert sum(name.startswith(experts) for name in stored) == 8 * 3 * 2
    else:
        assert config["target_parameters"] == ["experts.w1", "experts.w2", "experts.w3"]
        assert "w3" not in config["target_modules"]
        assert "o_proj" in config["target_modules"]
        nests = ["", ".base_layer", ".base_layer.base_layer"]
        assert {n for n in stored if n.startswith(experts)} == {
            f"{experts}{nest}.lora_{half}.weight" for nest in nests for half in "AB"}
        assert stored[f"{experts}.lora_A.weight"].shape == (8 * 4, 32)
        # PEFT's own reading of B: [out, r·E] viewed as [out, r, E].
        assert torch.equal(stored[f"{experts}.lora_B.weight"].view(32, 4, 8)[:, :, 5], b[5])


def test_correction_of_stacks_as_peft_computes_it(tmp_path: Path) -> None:
    """Unshared factors, as PEFT trains them: delta[e] = B[:, :, e] A[e] with A [E, r, in] and B [out, r, E]."""
    text = plain().text_config
    model, generator = CausalLM(plain(), seed=1), torch.Generator().manual_seed(3)
    stored, deltas = dict[str, Tensor](), dict[str, Tensor]()
    # w1 and w3 only: w3, the later one, is outermost.
    for weight, nest in (("w3", ""), ("w1", ".base_layer")):
        a, b = torch.randn(8 * 2, 32, generator=generator), torch.randn(32, 2 * 8, generator=generator)
        stored |= {f"base_model.model.{MOE}experts{nest}.lora_{half}.weight": x for half, x in (("A", a), ("B", b))}
        deltas[f"{MOE}experts.{weight}"] = torch.einsum("ore,eri->eoi", b.view(32, 2, 8), a.view(8, 2, 32))
    save_file(stored, tmp_path / WEIGHTS)
    (tmp_path / CONFIG).write_text(json.dumps({
        "peft_type": "LORA", "r": 2, "lora_alpha": 3, "target_modules": [], "use_dora": False, "bias": "none",
        "target_parameters": ["experts.w3", "experts.w1"], "rank_pattern": {}}))
    before = {name: x.clone() for name, x in model.state_dict().items()}
    adapter = read_peft(tmp_path, text)
    merge_into(model, adapter)
    for name, x in model.state_dict().items():
        want = before[name] + 1.5 * deltas[name] if name in deltas else before[name]
        torch.testing.assert_close(x, want, rtol=1e-6, atol=1e-6)
    with pytest.raises(ManifestError, match=r"experts.*Merge the adapter"):
        adapter.shared(text)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_merged_model_is_base_plus_adapter(tmp_path: Path, ids: Tensor, layout: PeftLayout) -> None:
    model = CausalLM(plain(), seed=1)
    write_base(tmp_path / "base", model)
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    tensors = trained(model)
    write_peft(tmp_path / "adapter", plain().text_config, LORA, tensors, layout)
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert (tmp_path / "merged" / "tokenizer.json").read_text() == "{}"
    with torch.no_grad():
        want, found = model(ids), BaseStore.open(tmp_path / "merged").model()(ids)
        lora.detach(model)
        change = (want - model(ids)).norm()
    assert change > 0.1 * want.norm()
    assert (found - want).norm() < 1e-5 * want.norm()


def test_bf16_bases_round_the_sum_once(tmp_path: Path) -> None:
    config = plain("bfloat16")
    model = CausalLM(config, seed=1)
    write_base(tmp_path / "base", model)
    write_peft(tmp_path / "adapter", config.text_config, LORA, trained(model), "per-expert")
    merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    name = "model.layers.0.self_attn.o_proj"
    a, b = (load_file(tmp_path / "adapter" / WEIGHTS)[f"base_model.model.{name}.lora_{half}.weight"] for half in "AB")
    base, merged = (BaseStore.open(tmp_path / f).tensor(f"{name}.weight") for f in ("base", "merged"))
    assert torch.equal(merged, (base.float() + 2.0 * (b @ a)).bfloat16())


def test_packed_bases_are_refused_with_the_remedy(tmp_path: Path) -> None:
    model = CausalLM(tiny(), seed=1)
    write_base(tmp_path / "base", model)
    write_peft(tmp_path / "adapter", tiny().text_config, LORA, trained(model), "per-expert")
    with pytest.raises(InputError, match=r"packed MXFP4 .* tidemill model convert .*base DST --experts f32"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_merging_over_something_is_refused(tmp_path: Path) -> None:
    model = CausalLM(plain(), seed=1)
    write_base(tmp_path / "base", model)
    with pytest.raises(InputError, match="not empty"):
        merge(tmp_path / "base", tmp_path / "adapter", tmp_path / "base")


def option(name: str, value: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(data | {name: value}))
    return change


def weights(edit: Callable[[Tensors], object]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        tensors = {name: x.clone() for name, x in load_file(folder / WEIGHTS).items()}
        edit(tensors)
        save_file(tensors, folder / WEIGHTS)
    return change


O_PROJ = "base_model.model.model.layers.0.self_attn.o_proj.lora_"
EXPERT = f"base_model.model.{MOE}experts.5.w1.lora_"
BAD: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "DoRA": (option("use_dora", True), ManifestError, "use_dora = True: only plain LoRA"),
    "ranks per module": (option("rank_pattern", {"o_proj": 2}), ManifestError, "rank_pattern"),
    "another method": (option("peft_type", "IA3"), ManifestError, "peft_type 'IA3'"),
    "another rank": (option("r", 3), ManifestError, "expected rank 3"),
    "no configuration": (lambda f: (f / CONFIG).unlink(), ManifestError, "cannot read"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), IntegrityError, "missing"),
    "half a pair": (weights(lambda t: t.pop(O_PROJ + "B.weight")), ManifestError, r"lora_B of .*o_proj\.weight is mis"),
    "one expert less": (weights(lambda t: [t.pop(EXPERT + h + ".weight") for h in "AB"]), ManifestError,
                        r"experts\.w1 has factors for 7 of 8"),
    "shape": (weights(lambda t: t.update({O_PROJ + "A.weight": torch.zeros(4, 7)})), ManifestError, r"\[1, 4, 7\]"),
    "NaN": (weights(lambda t: t[O_PROJ + "A.weight"].fill_(float("nan"))), IntegrityError, "o_proj.lora_A.* holds NaN"),
    "unknown module": (weights(lambda t: t.update({O_PROJ.replace("o_proj", "x_proj") + "A.weight": torch.ones(1)})),
                       ManifestError, r"no weight model\.layers\.0\.self_attn\.x_proj\.weight"),
    "another tensor": (weights(lambda t: t.update({"base_model.model.lm_head.weight": torch.ones(1)})), ManifestError,
                       "no factor of a LoRA adapter"),
    "wrappers nobody named": (weights(lambda t: t.update({f"base_model.model.{MOE}experts.lora_A.weight":
                                                          torch.ones(32, 32)})), ManifestError, "does not name"),
}


@pytest.mark.parametrize("kind", BAD)
def test_adapters_that_do_not_fit_are_refused(tmp_path: Path, kind: str) -> None:
    damage, error, message = BAD[kind]
    write_peft(tmp_path, plain().text_config, LORA, trained(CausalLM(plain(), seed=1)), "per-expert")
    damage(tmp_path)
    with pytest.raises(error, match=message):
        read_peft(tmp_path, plain().text_config)
