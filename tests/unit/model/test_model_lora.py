"""Adapters: what is trained, sharing, export and load, manifests, files, the engine's view."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

from tidemill.core.errors import ConfigError, IntegrityError, ManifestError
from tidemill.core.manifest import AdapterManifest
from tidemill.model import lora, peft_files
from tidemill.model.adapter_view import adapter_layers, is_zero
from tidemill.model.causal_lm import CausalLM
from tidemill.model.lora import LoraConfig
from tidemill.model.presets import k3, tiny, toy

CONFIG = LoraConfig(rank=4, alpha=8.0)
EXPERTS = "model.layers.2.block_sparse_moe.experts."


@pytest.fixture
def model() -> CausalLM:
    return CausalLM(tiny(), seed=1)


@pytest.fixture
def ids() -> torch.Tensor:
    return torch.randint(1, 96, (2, 20), generator=torch.Generator().manual_seed(2))


def trained(model: CausalLM) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(8)
    for p in lora.attach(model, CONFIG, seed=5):
        p.data.add_(0.1 * torch.randn(p.shape, generator=gen))
    return {k: v.clone() for k, v in lora.export_adapter(model, CONFIG).items()}


def manifest_of(tensors: dict[str, torch.Tensor]) -> AdapterManifest:
    return lora.build_manifest(
        tensors, version=3, base_digest="sha256:b", config_digest=CONFIG.digest, created_step=2
    )


def test_a_fresh_adapter_changes_nothing(model: CausalLM, ids: torch.Tensor) -> None:
    with torch.no_grad():
        before = model(ids)
        lora.attach(model, CONFIG)
        assert torch.equal(model(ids), before)


def test_only_factors_train_and_all_of_them_do(model: CausalLM, ids: torch.Tensor) -> None:
    params = lora.attach(model, CONFIG)
    assert {id(p) for p in params} == {id(p) for p in model.parameters() if p.requires_grad}
    base = {k: v.clone() for k, v in model.state_dict().items() if "lora" not in k}
    optimizer = torch.optim.Adam(params, lr=1e-2)
    model(ids).logsumexp(-1).mean().backward()
    for _ in range(2):
        optimizer.step()
        optimizer.zero_grad()
        model(ids).logsumexp(-1).mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in params)
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in base.items())


def test_first_step_gradients_are_in_b_alone(model: CausalLM, ids: torch.Tensor) -> None:
    lora.attach(model, CONFIG)
    model(ids).logsumexp(-1).mean().backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            is_b = name.rsplit(".", 1)[1].startswith("lora_b")
            assert p.grad is not None
            assert bool(p.grad.any()) == is_b, name


def test_names_shapes_and_sharing(model: CausalLM) -> None:
    tensors = trained(model)
    shapes = {name: tuple(x.shape) for name, x in tensors.items()}
    assert shapes == lora.adapter_shapes(model.config.text_config, CONFIG)
    assert shapes[EXPERTS + "w1.lora_A.weight"] == (1, 4, 32)
    assert shapes[EXPERTS + "w1.lora_B.weight"] == (8, 32, 4)
    assert shapes[EXPERTS + "w2.lora_A.weight"] == (8, 4, 32)
    assert shapes[EXPERTS + "w2.lora_B.weight"] == (1, 32, 4)
    for a, b in (("experts.w1", "experts.w3"), ("shared_experts.gate_proj", "shared_experts.up_proj")):
        prefix = "model.layers.2.block_sparse_moe."
        assert torch.equal(tensors[f"{prefix}{a}.lora_A.weight"], tensors[f"{prefix}{b}.lora_A.weight"])
    assert "model.layers.3.self_attn.q_a_proj.lora_A.weight" in shapes
    assert "model.layers.2.self_attn.q_a_proj.lora_A.weight" not in shapes


def test_counts_of_the_released_model() -> None:
    """1,392 exported tensors with 24,533,876,736 entries at rank 32 (shared factors exported per module)."""
    text, config = k3().text_config, LoraConfig(rank=32, alpha=64.0)
    shapes = lora.adapter_shapes(text, config)
    assert len(shapes) == 1392
    assert sum(math.prod(s) for s in shapes.values()) == 24_533_876_736


def test_export_and_load_round_trip(model: CausalLM, ids: torch.Tensor) -> None:
    tensors = trained(model)
    other = CausalLM(tiny(), seed=1)
    lora.load_adapter(other, CONFIG, tensors)
    with torch.no_grad():
        assert torch.equal(other(ids), model(ids))
    again = lora.export_adapter(other, CONFIG)
    assert all(torch.equal(again[name], x) for name, x in tensors.items())
    lora.detach(other)
    with torch.no_grad():
        assert torch.equal(other(ids), CausalLM(tiny(), seed=1)(ids))
    with pytest.raises(ManifestError, match="no adapter attached"):
        lora.export_adapter(other, CONFIG)


def test_the_correction_is_the_formula() -> None:
    model = CausalLM(toy(64), seed=1)
    tensors = trained(model)
    linear = model.model.layers[0].self_attn.o_proj
    x = torch.randn(5, 64)
    a = tensors["model.layers.0.self_attn.o_proj.lora_A.weight"]
    b = tensors["model.layers.0.self_attn.o_proj.lora_B.weight"]
    torch.testing.assert_close(linear(x), x @ linear.weight.t() + 2.0 * x @ a.t() @ b.t(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("targets", [("attn_out",), ("experts",), ("dense", "mla_down")])
def test_targets_choose_modules(model: CausalLM, targets: tuple[str, ...]) -> None:
    config = LoraConfig(rank=2, alpha=4.0, targets=targets)
    lora.attach(model, config)
    assert lora.export_adapter(model, config).keys() == lora.adapter_shapes(model.config.text_config, config).keys()


def test_manifest_and_one_flipped_bit(model: CausalLM) -> None:
    tensors = trained(model)
    manifest = manifest_of(tensors)
    assert AdapterManifest.from_json(manifest.to_json()) == manifest
    assert lora.verify_tensors(tensors, manifest) == manifest.count
    name = EXPERTS + "w1.lora_B.weight"
    changed = tensors | {name: tensors[name].clone()}
    changed[name].view(torch.int32)[0, 0, 0] ^= 1
    other = manifest_of(changed)
    assert other.manifest_sha256 != manifest.manifest_sha256
    with pytest.raises(IntegrityError, match=r"w1\.lora_B"):
        lora.verify_tensors(changed, manifest)
    assert lora.verify_tensors(changed, manifest, [n for n in tensors if n != name]) == manifest.count - 1
    missing = {k: v for k, v in tensors.items() if k != name}
    with pytest.raises(ManifestError, match="missing"):
        lora.verify_tensors(missing, manifest)
    with pytest.raises(ManifestError, match="not in the manifest"):
        lora.verify_tensors(tensors | {"x": tensors[name]}, manifest)
    with pytest.raises(ManifestError, match="no tensors"):
        lora.build_manifest({}, version=1, base_digest="b", config_digest="c", created_step=0)


def test_adapters_that_do_not_fit_are_refused(model: CausalLM) -> None:
    tensors = trained(model)
    name = EXPERTS + "w1.lora_B.weight"
    text = model.config.text_config
    cases = [
        ({k: v for k, v in tensors.items() if k != name}, ManifestError, "w1.lora_B.weight is missing"),
        (tensors | {"model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(4, 48)}, ManifestError, "unexpected"),
        (tensors | {name: tensors[name][:, :, :3]}, ManifestError, "expected float32"),
        (tensors | {name: tensors[name].double()}, ManifestError, "float64"),
        (tensors | {name: tensors[name] * float("nan")}, IntegrityError, "NaN"),
        (tensors | {EXPERTS + "w3.lora_A.weight": torch.zeros(1, 4, 32)}, ManifestError, "one shared factor"),
    ]
    for given, error, message in cases:
        with pytest.raises(error, match=message):
            lora.load_adapter(CausalLM(tiny()), CONFIG, given)
        with pytest.raises(error, match=message):
            adapter_layers(text, CONFIG, given)
    fewer = dataclasses.replace(CONFIG, targets=("attn_out",))
    with pytest.raises(ManifestError, match="unexpected"):
        lora.check_adapter(text, fewer, tensors)
    with pytest.raises(ConfigError, match="rank 4"):
        lora.require_same_targets(CONFIG, fewer)
    lora.require_same_targets(CONFIG, dataclasses.replace(CONFIG, alpha=1.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank = 0"), ({"alpha": -1.0}, "alpha"), ({"targets": ("q_proj",)}, "attn_out"),
        ({"targets": ()}, "one or more"), ({"targets": ("dense", "dense")}, "once"), ({"dtype": "int8"}, "float32"),
    ],
)
def test_bad_settings(change: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**change)  # type: ignore[arg-type]


def test_settings_cross_the_engines_border() -> None:
    assert LoraConfig.from_adapter_config(CONFIG.to_adapter_config()) == CONFIG
    assert dataclasses.replace(CONFIG, rank=5).digest != CONFIG.digest
    assert dataclasses.replace(CONFIG, targets=tuple(reversed(CONFIG.targets))).digest == CONFIG.digest


def test_engine_view(model: CausalLM) -> None:
    text = model.config.text_config
    lora.attach(model, CONFIG)
    fresh = adapter_layers(text, CONFIG, lora.export_adapter(model, CONFIG))
    assert is_zero(fresh)
    layers = adapter_layers(text, CONFIG, trained(model))
    assert not is_zero(layers)
    assert layers[0].experts is None
    assert set(layers[0].modules) == {"self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    experts = layers[2].experts
    assert experts is not None
    assert (experts.a13.shape, experts.b1.shape, experts.a2.shape, experts.b2.shape) == (
        (16, 32), (8, 32, 16), (8, 16, 32), (32, 16),
    )
    factors = layers[0].get("self_attn.o_proj")
    assert factors is not None
    x = torch.randn(3, 48)
    linear = model.model.layers[0].self_attn.o_proj
    torch.testing.assert_close(factors.delta(x), linear(x) - x @ linear.weight.t(), rtol=1e-4, atol=1e-5)


def test_files(model: CausalLM, tmp_path: Path) -> None:
    tensors = trained(model)
    manifest = manifest_of(tensors)
    peft_files.write_adapter(tmp_path / "v1", CONFIG, tensors, manifest)
    config, read, listed = peft_files.read_adapter(tmp_path / "v1")
    assert (config, listed) == (CONFIG, manifest)
    assert all(torch.equal(read[name], x) for name, x in tensors.items())
    weights = tmp_path / "v1" / peft_files.WEIGHTS
    data = bytearray(weights.read_bytes())
    data[-3] ^= 4
    weights.write_bytes(data)
    with pytest.raises(IntegrityError, match="are not what its manifest says"):
        peft_files.read_adapter(tmp_path / "v1")
    (tmp_path / "v1" / peft_files.CONFIG).write_text("{}")
    with pytest.raises(ManifestError, match="malformed"):
        peft_files.read_adapter(tmp_path / "v1")
    (tmp_path / "v1" / peft_files.CONFIG).write_text("{")
    with pytest.raises(ManifestError, match="not valid JSON"):
        peft_files.read_adapter(tmp_path / "v1")
    (tmp_path / "v1" / peft_files.MANIFEST).unlink()
    with pytest.raises(ManifestError, match="not valid JSON"):
        peft_files.read_adapter(tmp_path / "v1")


def test_lora_in_a_bf16_model() -> None:
    model = CausalLM(tiny(dtype="bfloat16"), seed=1)
    params = lora.attach(model, CONFIG)
    model(torch.randint(0, 96, (1, 9))).float().logsumexp(-1).sum().backward()
    assert all(p.dtype is torch.float32 for p in params)
    assert any(p.grad is not None and p.grad.any() for p in params)
