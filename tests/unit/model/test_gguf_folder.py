"""Model folders to GGUF and back: the same function, the same bytes of experts, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import pytest
import torch

from tidemill.core.config import replace
from tidemill.core.errors import ConfigError, InputError, IntegrityError, ManifestError
from tidemill.model.base import MANIFEST, BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.config import ModelConfig
from tidemill.model.gguf import container, export_gguf, import_gguf
from tidemill.model.gguf.container import GgufFile, TensorKind, TensorSlot, Value, write_gguf
from tidemill.model.presets import tiny, tiny_linear

IDS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(3))


def lively(config: ModelConfig) -> CausalLM:
    """Every tensor far from its neutral value, so that a swapped or dropped one shows."""
    model = CausalLM(config, seed=1)
    gen = torch.Generator().manual_seed(2)
    heads = config.text_config.linear_attn_config.num_heads
    with torch.no_grad():
        for name, x in model.state_dict().items():
            noise = torch.randn(x.shape, generator=gen)
            if name.endswith(("norm.weight", "layernorm.weight")):
                x.add_(0.25 * noise)
            elif name.endswith("res_proj.weight"):
                x.copy_(0.4 * noise)
            elif name.endswith(("e_score_correction_bias", "dt_bias")):
                x.add_(0.3 * noise)
            elif name.endswith("A_log"):
                x.zero_().view(-1)[:heads] = torch.rand(heads, generator=gen) * 1.5 - 0.5
    return model


def changed(config: ModelConfig, **fields: object) -> ModelConfig:
    return replace(config, text_config=replace(config.text_config, **fields))


CONFIGS = {
    "K3": tiny(),
    "K3, unpacked experts": changed(tiny(), quantize_experts=False),
    "K3, plain residual, no latent, no gate": changed(
        tiny(), attn_res_block_size=None, routed_expert_hidden_size=None, latent_moe_use_norm=False,
        mla_use_output_gate=False, q_lora_rank=None, quantize_experts=False),
    "K3, latent eps of the reference": changed(tiny(), mla_latent_norm_eps=1e-6),
    "K3, no cap, dense": changed(tiny(), activation_situ_linear_beta=None, first_k_dense_replace=6),
    "Kimi Linear": tiny_linear(),
}


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of `tiny` and beside it the same model as m.gguf, written once."""
    folder = tmp_path_factory.mktemp("gguf") / "ours"
    make(folder, tiny())
    export_gguf(folder, folder.with_name("m.gguf"), tokenizer=False)
    return folder


def make(folder: Path, config: ModelConfig) -> CausalLM:
    write_base(folder, lively(config))
    return BaseStore.open(folder).model()


@pytest.mark.parametrize("name", CONFIGS)
def test_there_and_back_is_the_same_function(tmp_path: Path, name: str) -> None:
    model = make(tmp_path / "ours", CONFIGS[name])
    size = export_gguf(tmp_path / "ours", tmp_path / "m.gguf", tokenizer=False)
    assert size == (tmp_path / "m.gguf").stat().st_size
    manifest = import_gguf(tmp_path / "m.gguf", tmp_path / "back")
    store = BaseStore.open(tmp_path / "back")
    assert store.manifest == manifest
    want, got = model(IDS), store.model()(IDS)
    assert want.std() > 0.1
    assert (got - want).norm() / want.norm() < 1e-6
    ours, back = CONFIGS[name].text_config, store.config.text_config
    unsaid = {"initializer_range": ours.initializer_range}
    linear = replace(back.linear_attn_config, a_log_size=ours.linear_attn_config.a_log_size)
    assert replace(back, linear_attn_config=linear, **unsaid) == ours


def test_packed_experts_keep_their_bytes(ours: Path, tmp_path: Path) -> None:
    import_gguf(ours.with_name("m.gguf"), tmp_path / "back")
    a, b = BaseStore.open(ours), BaseStore.open(tmp_path / "back")
    experts = {t.name: t.sha256 for t in a.manifest.tensors if "weight_packed" in t.name or "weight_scale" in t.name}
    assert len(experts) > 100
    assert experts.items() <= {t.name: t.sha256 for t in b.manifest.tensors}.items()


def test_kinds_of_tensors_follow_the_choices(ours: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    export_gguf(ours, path, dense="bf16", experts="bf16", tokenizer=False)
    kinds = {name: slot.kind for name, slot in GgufFile(path).slots.items()}
    exact = {name for name, kind in kinds.items() if kind is TensorKind.F32}
    assert exact == {n for n in kinds if n.endswith((
        "norm.weight", "score.weight", ".bias", "ssm_a", "conv1d_q.weight", "conv1d_k.weight", "conv1d_v.weight",
        "ffn_gate_inp.weight"))}
    assert set(kinds.values()) == {TensorKind.F32, TensorKind.BF16}
    import_gguf(path, tmp_path / "back")
    back = BaseStore.open(tmp_path / "back")
    assert back.config.text_config.dtype == "bfloat16"
    assert not back.config.text_config.quantize_experts
    # Decoded MXFP4 values fit bf16, so nothing was lost on the way.
    name = "model.layers.2.block_sparse_moe.experts.w2"
    assert torch.equal(back.tensor(name).float(), BaseStore.open(ours).decoded(name))
    import_gguf(path, tmp_path / "wide", dtype="float32")
    assert BaseStore.open(tmp_path / "wide").config.text_config.dtype == "float32"


def test_unpacked_experts_can_be_quantised(ours: Path, tmp_path: Path) -> None:
    write_base(tmp_path / "plain", lively(changed(tiny(), quantize_experts=False)))
    export_gguf(tmp_path / "plain", tmp_path / "plain.gguf", experts="mxfp4", tokenizer=False)
    a, b = GgufFile(tmp_path / "plain.gguf"), GgufFile(ours.with_name("m.gguf"))
    assert all(torch.equal(a.tensor(name), b.tensor(name)) for name in b.slots)


def test_the_metadata_says_what_llama_cpp_reads(ours: Path) -> None:
    fields = {name: f.contents() for name, f in gguf.GGUFReader(ours.with_name("m.gguf")).fields.items()}
    want = {
        "general.architecture": "kimi-k3", "general.file_type": 38, "tokenizer.ggml.model": "none",
        "kimi-k3.block_count": 7, "kimi-k3.attention.head_count_kv": [0, 0, 0, 1, 0, 0, 1],
        "kimi-k3.attention.key_length": 40, "kimi-k3.attention.value_length": 32,
        "kimi-k3.attention.key_length_mla": 24, "kimi-k3.attention.value_length_mla": 24,
        "kimi-k3.rope.dimension_count": 8, "kimi-k3.kda.gate_lower_bound": -5.0, "kimi-k3.expert_weights_norm": True,
        "kimi-k3.expert_gating_func": 2, "kimi-k3.expert_latent_length": 32, "kimi-k3.attn_res.block_size": 3,
        "kimi-k3.activation.situ_beta": 4.0, "kimi-k3.activation.situ_linear_beta": 25.0,
    }
    assert {key: fields[key] for key in want} == want


def test_the_parts_that_change_form(ours: Path) -> None:
    file, store = GgufFile(ours.with_name("m.gguf")), BaseStore.open(ours)
    state = store.state_dict()
    a_log = state["model.layers.0.self_attn.A_log"][:3]
    assert torch.equal(file.tensor("blk.0.ssm_a"), -a_log.exp())
    score = state["model.layers.2.mlp_res_norm.weight"] * state["model.layers.2.mlp_res_proj.weight"][0]
    assert torch.equal(file.tensor("blk.2.ffn_res_score.weight"), score)
    kv_b = state["model.layers.3.self_attn.kv_b_proj.weight"].view(3, 16 + 24, 32)
    assert torch.equal(file.tensor("blk.3.attn_k_b.weight"), kv_b[:, :16].transpose(1, 2))
    assert torch.equal(file.tensor("blk.3.attn_v_b.weight"), kv_b[:, 16:])
    for name, ours_name in {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}.items():
        scales = store.packed(f"model.layers.2.block_sparse_moe.experts.{ours_name}")[1]
        assert torch.equal(file.tensor(f"blk.2.{name}.weight")[..., 0], scales), name
    taps = state["model.layers.0.self_attn.k_conv1d.weight"]
    assert torch.equal(file.tensor("blk.0.ssm_conv1d_k.weight"), taps.view(1, 48, 1, 4))


@pytest.mark.parametrize(("fields", "field"), [
    ({"hidden_act": "silu"}, "hidden_act"),
    ({"linear_attn_config": {"num_heads": 6, "head_dim": 8}}, "num_heads"),
    ({"linear_attn_config": {"use_full_rank_gate": False}}, "use_full_rank_gate"),
    ({"linear_attn_config": {"full_attn_layers": (), "kda_layers": (1, 2, 3, 4, 5, 6, 7)}}, "full_attn_layers"),
])
def test_what_the_format_has_no_place_for_is_refused(tmp_path: Path, fields: dict[str, object], field: str) -> None:
    linear = fields.get("linear_attn_config")
    if isinstance(linear, dict):
        old = tiny().text_config.linear_attn_config
        fields = {"linear_attn_config": replace(old, a_log_size=None, **linear)}
    make(tmp_path / "ours", changed(tiny(), **fields))
    with pytest.raises(ConfigError, match=field):
        export_gguf(tmp_path / "ours", tmp_path / "m.gguf", tokenizer=False)
    assert not (tmp_path / "m.gguf").exists()


def test_unknown_kinds_and_a_missing_tokenizer_are_refused(ours: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="dense = 'mxfp4'"):
        export_gguf(ours, tmp_path / "m.gguf", dense="mxfp4", tokenizer=False)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"no tokenizer\.json"):
        export_gguf(ours, tmp_path / "m.gguf")
    assert not list(tmp_path.iterdir())


Content = dict[str, tuple[TensorSlot, torch.Tensor]]


def rewrite(source: Path, path: Path, change: Callable[[dict[str, Value], Content], None]) -> None:
    """The file again with other metadata or tensors, as another program might have written it."""
    file = GgufFile(source)
    metadata = {k: v for k, v in file.metadata.items() if not k.startswith("tidemill.")}
    content = {name: (slot, file.tensor(name).clone()) for name, slot in file.slots.items()}
    change(metadata, content)
    write_gguf(path, metadata, [slot for slot, _ in content.values()], lambda s: iter([content[s.name][1]]))


def _pop(name: str) -> Callable[[dict[str, Value], Content], None]:
    def change(metadata: dict[str, Value], content: Content) -> None:
        metadata.pop(name, None)
        content.pop(name, None)

    return change


def _set(name: str, value: Value) -> Callable[[dict[str, Value], Content], None]:
    return lambda metadata, _: metadata.update({name: value})


def _unexpected(_: dict[str, Value], content: Content) -> None:
    content["blk.0.more"] = TensorSlot("blk.0.more", (4,), TensorKind.F32), torch.zeros(4)


def _transposed(_: dict[str, Value], content: Content) -> None:
    slot, x = content["blk.0.ssm_f_b.weight"]
    content[slot.name] = TensorSlot(slot.name, slot.shape[::-1], slot.kind), x


def _not_finite(_: dict[str, Value], content: Content) -> None:
    content["blk.1.attn_q.weight"][1][0, 0] = float("nan")


def _half_packed(_: dict[str, Value], content: Content) -> None:
    name = "blk.2.ffn_up_exps.weight"
    content[name] = TensorSlot(name, content[name][0].shape, TensorKind.F32), torch.zeros(content[name][0].shape)


@pytest.mark.parametrize(("change", "error", "words"), [
    (_set("general.architecture", "llama"), ManifestError, "'llama', expected kimi-k3 or kimi-linear"),
    (_pop("kimi-k3.kda.head_dim"), ManifestError, r"kimi-k3\.kda\.head_dim is missing"),
    (_set("kimi-k3.block_count", "seven"), ManifestError, "block_count = 'seven'"),
    (_set("kimi-k3.attention.head_count_kv", [1, 0]), ManifestError, "head_count_kv"),
    (_set("kimi-k3.expert_gating_func", 1), ManifestError, "expert_gating_func"),
    (_set("kimi-k3.expert_used_count", 99), ManifestError, "num_experts_per_token"),
    (_set("kimi-k3.vocab_size", 97), ManifestError, r"token_embd\.weight has the shape"),
    (_pop("blk.2.ssm_beta.weight"), ManifestError, r"blk\.2\.ssm_beta\.weight is missing"),
    (_unexpected, ManifestError, r"blk\.0\.more is unexpected"),
    (_transposed, ManifestError, r"blk\.0\.ssm_f_b\.weight has the shape"),
    (_not_finite, IntegrityError, r"blk\.1\.attn_q\.weight holds NaN"),
    (_half_packed, ManifestError, r"blk\.2\.ffn_up_exps\.weight is F32"),
    (_set("tokenizer.ggml.model", "llama"), ManifestError, "without its tokenizer"),
])
def test_another_file_is_refused_with_its_reason(ours: Path, tmp_path: Path, error: type[Exception], words: str,
                                                 change: Callable[[dict[str, Value], Content], None]) -> None:
    path = tmp_path / "changed.gguf"
    rewrite(ours.with_name("m.gguf"), path, change)
    with pytest.raises(error, match=words):
        import_gguf(path, tmp_path / "back")
    assert not (tmp_path / "back" / MANIFEST).exists()


def test_files_of_other_writers_are_read(tmp_path: Path) -> None:
    """Without our own keys, with F16 matrices, an extra axis, and one number of experts per layer."""
    model = make(tmp_path / "ours", changed(tiny(), quantize_experts=False))
    path = tmp_path / "m.gguf"
    export_gguf(tmp_path / "ours", path, tokenizer=False)

    def change(metadata: dict[str, Value], content: Content) -> None:
        metadata["kimi-k3.expert_feed_forward_length"] = [32] * 7
        slot, x = content["token_embd.weight"]
        content[slot.name] = TensorSlot(slot.name, slot.shape, TensorKind.F16), x.half()
        slot, x = content["blk.0.ssm_a"]
        content[slot.name] = TensorSlot(slot.name, (1, *slot.shape), slot.kind), x

    rewrite(path, tmp_path / "changed.gguf", change)
    import_gguf(tmp_path / "changed.gguf", tmp_path / "back")
    back = BaseStore.open(tmp_path / "back").model()
    embedding = model.state_dict()["model.embed_tokens.weight"]
    embedding.copy_(embedding.half())
    want, got = model(IDS), back(IDS)
    assert (got - want).norm() / want.norm() < 1e-6


def test_a_folder_with_a_model_is_not_overwritten(ours: Path) -> None:
    with pytest.raises(InputError, match="holds a model already"):
        import_gguf(ours.with_name("m.gguf"), ours)


def test_experts_are_written_one_at_a_time(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces: list[int] = []
    write = container.tensor_bytes
    monkeypatch.setattr(container, "tensor_bytes", lambda x: (pieces.append(x.numel()), write(x))[1])
    export_gguf(ours, tmp_path / "m.gguf", tokenizer=False)
    assert pieces.count(32 * 17) == 6 * 3 * 8
