"""Hugging Face folders of every shape, made with the safetensors library, and every kind of damage to them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tidemill.core.errors import ConfigError, IntegrityError, ManifestError
from tidemill.kernels import mxfp4
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.checkpoint import Checkpoint
from tidemill.model.config import ModelConfig, VisionConfig
from tidemill.model.inventory import vision_inventory
from tidemill.model.presets import tiny, tiny_linear
from tidemill.model.shards import INDEX, WEIGHTS

Tensors = dict[str, Tensor]
STACK = "model.layers.1.block_sparse_moe.experts.w1"
PACKED = "model.layers.1.block_sparse_moe.experts.3.w1.weight_packed"
SCALE = PACKED.replace("_packed", "_scale")
A_LOG, CONV = "model.layers.0.self_attn.A_log", "model.layers.0.self_attn.q_conv1d.weight"
SHARDS = [f"model-{i:05d}-of-000003.safetensors" for i in (1, 2, 3)]
VISION = VisionConfig(vt_hidden_size=8, qkv_hidden_size=8, vt_num_hidden_layers=2, vt_intermediate_size=16,
                      init_pos_emb_height=2, init_pos_emb_width=2, text_hidden_size=48)


@pytest.fixture(scope="module")
def model() -> CausalLM:
    """A model whose experts are MXFP4 values and whose padding is zero, as of a released checkpoint."""
    model = CausalLM(tiny(), seed=1)
    with torch.no_grad():
        for name, x in model.state_dict().items():
            if ".experts.w" in name:
                x.copy_(mxfp4.decode(*mxfp4.encode(x)))
            elif name.endswith("A_log"):
                x[:3].uniform_(-1, 1, generator=torch.Generator().manual_seed(2))
    return model


def per_expert(state: Tensors, *, packed: bool) -> Tensors:
    """The released form, by a loop of our own."""
    out: Tensors = {}
    for name, x in state.items():
        stack, _, weight = name.rpartition(".")
        if not stack.endswith(".experts"):
            out[name] = x.clone()
            continue
        for e in range(x.shape[0]):
            if packed:
                codes, scale = mxfp4.encode(x[e])
                out[f"{stack}.{e}.{weight}.weight_packed"], out[f"{stack}.{e}.{weight}.weight_scale"] = codes, scale
            else:
                out[f"{stack}.{e}.{weight}.weight"] = x[e].clone()
    return out


def stacked_packed(state: Tensors) -> Tensors:
    out: Tensors = {}
    for name, x in state.items():
        if ".experts.w" in name:
            out[name + "_packed"], out[name + "_scale"] = mxfp4.encode(x)
        else:
            out[name] = x.clone()
    return out


def prefixed(tensors: Tensors) -> Tensors:
    return {"language_model." + name: x for name, x in tensors.items()}


def odd_shapes(tensors: Tensors) -> Tensors:
    out = dict(tensors)
    for name, x in tensors.items():
        if "_conv1d" in name:
            out[name] = x.squeeze(1).contiguous()
        elif name.endswith("A_log"):
            out[name] = x[:3].view(1, 1, 3, 1).contiguous() if ".layers.0." in name else torch.cat([x, torch.zeros(4)])
    return out


FORMS: dict[str, Callable[[Tensors], Tensors]] = {
    "as released": lambda s: prefixed(per_expert(s, packed=True)),
    "without prefix": lambda s: per_expert(s, packed=True),
    "plain experts": lambda s: per_expert(s, packed=False),
    "stacked": lambda s: dict(s),
    "stacked and packed": stacked_packed,
    "other shapes of convolutions and A_log": lambda s: odd_shapes(per_expert(s, packed=True)),
    "experts of one layer plain": lambda s: per_expert(
        {k: v for k, v in s.items() if ".layers.2." not in k}, packed=True) | per_expert(
        {k: v for k, v in s.items() if ".layers.2." in k}, packed=False),
}


def write(folder: Path, tensors: Tensors, config: ModelConfig | None = None, *, index: bool = True) -> Path:
    """Three shards, tensors dealt out in turn, with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (config or tiny()).write(folder)
    shards: list[Tensors] = [{}, {}, {}]
    for i, (name, x) in enumerate(tensors.items()):
        shards[i % 3][name] = x.contiguous()
    for name, shard in zip(SHARDS, shards, strict=True):
        save_file(shard, folder / name, metadata={"format": "pt"})
    if index:
        where = {tensor: name for name, shard in zip(SHARDS, shards, strict=True) for tensor in shard}
        (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": where}))
    return folder


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_folder_is_the_same_model(tmp_path: Path, model: CausalLM, form: str) -> None:
    state = model.state_dict()
    loaded = Checkpoint.open(write(tmp_path, FORMS[form](state), index=form != "stacked")).model()
    assert list(loaded.state_dict()) == list(state)
    for name, x in loaded.state_dict().items():
        assert torch.equal(x, state[name]), name


def test_a_single_file(tmp_path: Path, model: CausalLM) -> None:
    tiny().write(tmp_path)
    save_file(FORMS["as released"](model.state_dict()), tmp_path / WEIGHTS)
    checkpoint = Checkpoint.open(tmp_path)
    assert checkpoint.prefixed
    assert torch.equal(checkpoint.read("lm_head.weight"), model.lm_head.weight)


def test_whether_experts_are_packed_is_told_by_tensors_not_by_the_configuration(tmp_path: Path,
                                                                               model: CausalLM) -> None:
    config = tiny()
    plain = replace(config, text_config=replace(config.text_config, quantize_experts=False))
    packed = Checkpoint.open(write(tmp_path / "a", FORMS["as released"](model.state_dict()), plain))
    assert packed.config == config
    unpacked = Checkpoint.open(write(tmp_path / "b", FORMS["plain experts"](model.state_dict()), config))
    assert unpacked.config == plain


def test_the_packed_bytes_of_an_expert(tmp_path: Path, model: CausalLM) -> None:
    for form in ("as released", "stacked and packed"):
        checkpoint = Checkpoint.open(write(tmp_path / form, FORMS[form](model.state_dict())))
        want = mxfp4.encode(model.state_dict()[STACK][3])
        assert all(torch.equal(a, b) for a, b in zip(checkpoint.packed(STACK, 3), want, strict=True))


def test_vision_tensors_are_kept_aside(tmp_path: Path, model: CausalLM) -> None:
    config = ModelConfig(text_config=tiny().text_config, vision_config=VISION)
    vision = {name: torch.randn(spec.shape).bfloat16() for name, spec in vision_inventory(VISION).items()}
    checkpoint = Checkpoint.open(write(tmp_path, FORMS["as released"](model.state_dict()) | vision, config))
    assert sorted(checkpoint.vision) == sorted(vision)
    for name, x in vision.items():
        assert torch.equal(checkpoint.read_vision(name), x)
    text_only = Checkpoint.open(write(tmp_path / "text", FORMS["without prefix"](model.state_dict()), config))
    assert text_only.vision == {}
    del vision["mm_projector.proj.0.weight"]
    with pytest.raises(ManifestError, match=r"mm_projector\.proj\.0\.weight is missing"):
        Checkpoint.open(write(tmp_path / "part", FORMS["as released"](model.state_dict()) | vision, config))


def test_other_dtypes_are_read_where_that_is_exact(tmp_path: Path) -> None:
    config = tiny_linear(dtype="bfloat16")
    model = CausalLM(config, seed=1)
    wide = per_expert({name: x.float() for name, x in model.state_dict().items()}, packed=False)
    for name, x in Checkpoint.open(write(tmp_path / "wide", wide, config)).model().state_dict().items():
        assert torch.equal(x, model.state_dict()[name]), name
    wide["lm_head.weight"][0, 0] = 1.0 + 2**-10
    checkpoint = Checkpoint.open(write(tmp_path / "fine", wide, config))
    with pytest.raises(IntegrityError, match=r"lm_head\.weight is float32 and has values.*--dtype bfloat16"):
        checkpoint.model()
    assert float(checkpoint.read("lm_head.weight", rounding=True)[0, 0]) == 1.0


def test_half_precision_and_narrow_gates_are_widened(tmp_path: Path, model: CausalLM) -> None:
    state = {name: x.half().float() if "_conv" in name else x for name, x in model.state_dict().items()}
    stored = {n: x.half() if "_conv" in n else x for n, x in per_expert(state, packed=True).items()}
    assert torch.equal(Checkpoint.open(write(tmp_path, stored)).read(CONV), state[CONV])


def with_value(name: str, value: float, at: int = 0) -> Callable[[Tensors], Tensors]:
    def change(tensors: Tensors) -> Tensors:
        tensors[name].view(-1)[at] = value
        return tensors
    return change


UNREADABLE: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "NaN": (with_value("model.norm.weight", float("nan")), r"model\.norm\.weight holds NaN"),
    "infinity": (with_value("lm_head.weight", float("inf"), 4000), r"lm_head\.weight holds NaN or infinity"),
    "NaN scale": (with_value(SCALE, 255, 7), r"experts\.3\.w1\.weight_scale holds the scale byte 255"),
    "infinite scale": (lambda t: with_value(PACKED, 0x77)(with_value(SCALE, 254)(t)), "make weights infinite"),
    "padding of A_log": (with_value(A_LOG, 0.5, 4), r"A_log has 5 entries, and those beyond the 3 heads"),
}


@pytest.mark.parametrize("kind", UNREADABLE)
def test_bad_values_are_refused_when_read(tmp_path: Path, model: CausalLM, kind: str) -> None:
    change, message = UNREADABLE[kind]
    checkpoint = Checkpoint.open(write(tmp_path, change(per_expert(model.state_dict(), packed=True))))
    with pytest.raises(IntegrityError, match=message) as e:
        checkpoint.model()
    assert str(tmp_path / "model-") in str(e.value)


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda t: {name: x for name, x in t.items() if name not in names}


def shaped(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Callable[[Tensors], Tensors]:
    return lambda t: t | {name: torch.zeros(shape, dtype=dtype)}


MISFITS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "missing": (without(PACKED), rf"{PACKED} is missing\. Check that config"),
    "four missing": (without("lm_head.weight", "model.norm.weight", A_LOG, CONV),
                     r"is missing \(4 in all; also .*, .*, …\)"),
    "unexpected": (shaped("model.layers.9.extra.weight", 3), r"model-0000\d.*: model\.layers\.9\.extra\.weight is un"),
    "shape": (shaped("lm_head.weight", 95, 48), r"lm_head\.weight is float32 \[95, 48\], expected float32 \[96, 48\]"),
    "dtype": (shaped("lm_head.weight", 96, 48, dtype=torch.uint8), r"lm_head\.weight is uint8"),
    "packed experts as floats": (shaped(PACKED, 32, 16), r"weight_packed is float32"),
    "A_log per channel": (shaped(A_LOG, 3, 16), r"A_log is float32 \[3, 16\]"),
    "A_log too short": (shaped(A_LOG, 2), r"A_log is float32 \[2\]"),
    "both forms of an expert": (shaped(PACKED.replace("_packed", ""), 32, 32), r"experts\.w1 lie in two forms"),
    "with and without prefix": (shaped("language_model.lm_head.weight", 96, 48), "are the same tensor"),
    "experts of another layer count": (
        lambda t: {n: x for n, x in t.items() if ".layers.6." not in n}, r"layers\.6\..* is missing \(\d+ in all"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_tensors_that_do_not_fit_are_refused_at_open(tmp_path: Path, model: CausalLM, kind: str) -> None:
    change, message = MISFITS[kind]
    with pytest.raises(ManifestError, match=message):
        Checkpoint.open(write(tmp_path, change(per_expert(model.state_dict(), packed=True))))


def header_of(path: Path) -> tuple[int, dict[str, dict[str, list[int]]]]:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    return length, json.loads(data[8 : 8 + length])


def raw_header(path: Path, raw: bytes, *, length: int | None = None) -> None:
    old = header_of(path)[0]
    path.write_bytes((length or len(raw)).to_bytes(8, "little") + raw + path.read_bytes()[8 + old :])


def overlap(folder: Path) -> None:
    _, header = header_of(folder / SHARDS[0])
    first, second = [k for k in header if k != "__metadata__"][:2]
    header[second]["data_offsets"], header[second]["shape"] = header[first]["data_offsets"], header[first]["shape"]
    header[second]["dtype"] = header[first]["dtype"]
    raw_header(folder / SHARDS[0], json.dumps(header).encode())


def index_entry(folder: Path, name: str, shard: str) -> None:
    data = json.loads((folder / INDEX).read_text())
    data["weight_map"][name] = shard
    (folder / INDEX).write_text(json.dumps(data))


def drop_from_index(folder: Path) -> None:
    data = json.loads((folder / INDEX).read_text())
    del data["weight_map"]["lm_head.weight"]
    (folder / INDEX).write_text(json.dumps(data))


def twice(folder: Path) -> None:
    tensors = load_file(folder / SHARDS[1]) | {"model.norm.weight": torch.ones(48), "lm_head.weight": torch.zeros(1)}
    save_file(tensors, folder / SHARDS[1])


DAMAGE: dict[str, tuple[Callable[[Path], object], type[Exception], str]] = {
    "a shard is missing": (lambda f: (f / SHARDS[1]).unlink(), IntegrityError, rf"{SHARDS[1]} is missing; .* holds "),
    "no index and a missing shard": (lambda f: [(f / SHARDS[1]).unlink(), (f / INDEX).unlink()], IntegrityError,
                                     rf"{SHARDS[1]} is missing \(1 of 3 shards"),
    "a shard is cut short": (lambda f: os.truncate(f / SHARDS[2], (f / SHARDS[2]).stat().st_size - 1), IntegrityError,
                             rf"{SHARDS[2]} is cut short"),
    "a shard is empty": (lambda f: os.truncate(f / SHARDS[2], 0), IntegrityError, "is empty"),
    "header longer than the file": (lambda f: raw_header(f / SHARDS[0], b"{}", length=2**63), IntegrityError,
                                    "header claims"),
    "header of nested lists": (lambda f: raw_header(f / SHARDS[0], b"[" * 200_000), IntegrityError, "corrupt header"),
    "tensor listed twice in a header": (lambda f: raw_header(f / SHARDS[0], b'{"a": 1, "a": 2}'), IntegrityError,
                                        "a is listed twice"),
    "negative offset": (lambda f: raw_header(f / SHARDS[0], b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": '
                                                            b'[-4, 0]}}'), IntegrityError, "entry of a is corrupt"),
    "unknown dtype": (lambda f: raw_header(f / SHARDS[0], b'{"a": {"dtype": "Q7", "shape": [1], "data_offsets": '
                                                          b'[0, 4]}}'), IntegrityError, "entry of a is corrupt"),
    "overlapping tensors": (overlap, IntegrityError, "overlap"),
    "index names a wrong shard": (lambda f: index_entry(f, "model.norm.weight", SHARDS[0]), ManifestError,
                                  r"holds no tensor model\.norm\.weight|though"),
    "index names a path outside": (lambda f: index_entry(f, "model.norm.weight", "../x.safetensors"), ManifestError,
                                   "no file of this folder"),
    "index leaves a tensor out": (drop_from_index, ManifestError, r"lm_head\.weight, which .* does not list"),
    "index is no JSON": (lambda f: (f / INDEX).write_text("{"), ManifestError, "malformed"),
    "index without a map": (lambda f: (f / INDEX).write_text("{}"), ManifestError, "malformed"),
    "index with an empty map": (lambda f: (f / INDEX).write_text('{"weight_map": {}}'), ManifestError, "no tensors"),
    "a tensor in two shards": (twice, ManifestError, "lies in .* and in"),
    "two sets of weights": (lambda f: [(f / INDEX).unlink(), save_file({"a": torch.ones(1)}, f / WEIGHTS)],
                            ManifestError, "unclear"),
    "no weights": (lambda f: [p.unlink() for p in f.glob("model*")], IntegrityError, "neither shards nor"),
    "configuration of another family": (lambda f: tiny_linear().write(f), ManifestError, "is missing"),
    "contradicting layer lists": (
        lambda f: (f / "config.json").write_text((f / "config.json").read_text().replace(
            '"full_attn_layers": [\n        4', '"full_attn_layers": [\n        5')), ConfigError, "both list"),
    "another model type": (
        lambda f: (f / "config.json").write_text('{"model_type": "llama"}'), ConfigError, "other families"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_refused_at_open_and_named(tmp_path: Path, model: CausalLM, kind: str) -> None:
    damage, error, message = DAMAGE[kind]
    folder = write(tmp_path, per_expert(model.state_dict(), packed=True))
    damage(folder)
    with pytest.raises(error, match=message):
        Checkpoint.open(folder)


def test_a_file_cut_while_it_is_read(tmp_path: Path, model: CausalLM) -> None:
    checkpoint = Checkpoint.open(write(tmp_path, per_expert(model.state_dict(), packed=True)))
    os.truncate(tmp_path / SHARDS[0], 30_000)
    with pytest.raises(IntegrityError, match="cut short while it was read"):
        checkpoint.model()


def test_a_base_in_shards(tmp_path: Path, model: CausalLM) -> None:
    single = write_base(tmp_path / "one", model)
    sharded = write_base(tmp_path / "many", model, max_shard_bytes=60_000)
    assert single == sharded
    files = sorted(p.name for p in (tmp_path / "many").glob("*.safetensors"))
    assert len(files) > 5
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "many" / INDEX).read_text())
    loaded = [load_file(tmp_path / "many" / name) for name in files]
    assert index["weight_map"] == {t: n for n, shard in zip(files, loaded, strict=True) for t in shard}
    sizes = [sum(x.nbytes for x in shard.values()) for shard in loaded]
    assert index["metadata"]["total_size"] == sum(sizes)
    assert all(size <= 60_000 for size, shard in zip(sizes, loaded, strict=True) if len(shard) > 1)
    store = BaseStore.open(tmp_path / "many")
    for name, x in BaseStore.open(tmp_path / "one").state_dict().items():
        assert torch.equal(store.decoded(name), x)
    assert store.packed(STACK)[0].data_ptr() == store.packed(STACK)[0].data_ptr()


def test_a_stack_cut_by_shards_is_still_one_tensor(tmp_path: Path, model: CausalLM) -> None:
    write_base(tmp_path, model, max_shard_bytes=1000)
    store = BaseStore.open(tmp_path)
    assert torch.equal(store.decoded(STACK), model.state_dict()[STACK])


def test_writing_over_a_base_in_shards_leaves_one_model(tmp_path: Path, model: CausalLM) -> None:
    write_base(tmp_path, model, max_shard_bytes=60_000)
    write_base(tmp_path, model, max_shard_bytes=200_000)
    assert BaseStore.open(tmp_path).digest
    write_base(tmp_path, model)
    assert [p.name for p in tmp_path.glob("model*.safetensors*")] == [WEIGHTS]
    assert BaseStore.open(tmp_path).digest


@pytest.mark.parametrize("form", ["as released", "other shapes of convolutions and A_log"])
def test_a_folder_without_our_manifest_is_no_base(tmp_path: Path, model: CausalLM, form: str) -> None:
    with pytest.raises(ManifestError, match=r"base-manifest\.json.*tidemill model convert SRC DST"):
        BaseStore.open(write(tmp_path, FORMS[form](model.state_dict())))
