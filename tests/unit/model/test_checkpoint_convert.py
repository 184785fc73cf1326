"""Conversions: same values in every form, kept bytes, kills at any point, full disks, refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tidemill.core.errors import CapacityError, InputError, IntegrityError
from tidemill.kernels import mxfp4
from tidemill.model.base import BaseStore, write_base
from tidemill.model.causal_lm import CausalLM
from tidemill.model.checkpoint import Checkpoint
from tidemill.model.config import ModelConfig, VisionConfig
from tidemill.model.convert import JOURNAL, Wanted, convert
from tidemill.model.inventory import vision_inventory
from tidemill.model.presets import tiny, tiny_linear
from tidemill.model.shards import WEIGHTS

STACK = "model.layers.1.block_sparse_moe.experts.w1"
SMALL = 60_000


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source") / "model"
    write_base(folder, CausalLM(tiny(), seed=1))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def values(folder: Path) -> dict[str, torch.Tensor]:
    return BaseStore.open(folder).state_dict()


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.mark.parametrize("layout", ["per-expert", "stacked"])
@pytest.mark.parametrize("experts", ["mxfp4", "f32"])
def test_every_form_holds_the_same_values(source: Path, tmp_path: Path, experts: str, layout: str) -> None:
    convert(source, tmp_path / "a", Wanted(experts=experts, layout=layout, max_shard_bytes=SMALL))
    store = BaseStore.open(tmp_path / "a")
    assert store.config.text_config.quantize_experts == (experts == "mxfp4")
    stacked = any(name.endswith((".experts.w1", ".experts.w1_packed")) for name in store.file_names())
    assert stacked == (layout == "stacked")
    for name, x in values(source).items():
        assert torch.equal(store.decoded(name), x), name
    assert (tmp_path / "a" / "tokenizer.json").read_text() == "{}"
    back = convert(tmp_path / "a", tmp_path / "b", Wanted(experts="mxfp4", layout="per-expert"))
    again = BaseStore.open(tmp_path / "b")
    for name, x in values(source).items():
        assert torch.equal(again.decoded(name), x), name
    assert back.base_digest == BaseStore.open(source).digest  # this encoder wrote the source, so bytes agree too


def test_a_released_folder_becomes_a_base(source: Path, tmp_path: Path) -> None:
    released = tmp_path / "released"
    released.mkdir()
    shutil.copy(source / "config.json", released)
    save_file({"language_model." + n: x for n, x in load_file(source / WEIGHTS).items()}, released / WEIGHTS)
    manifest = convert(released, tmp_path / "base", Wanted())
    assert manifest == BaseStore.open(source).manifest
    assert all(name.startswith("language_model.") for name in load_file(tmp_path / "base" / WEIGHTS))
    assert BaseStore.open(tmp_path / "base").verify()


def test_scale_bytes_our_encoder_would_not_choose_are_kept(source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    shutil.copytree(source, folder)
    tensors = load_file(folder / WEIGHTS)
    name = STACK.replace("experts.w1", "experts.3.w1.weight")
    tensors[name + "_packed"][0, 0] = 0x11
    tensors[name + "_packed"][0, 1:] = 0
    tensors[name + "_scale"][0, 0] = 130
    save_file(tensors, folder / WEIGHTS)
    convert(folder, tmp_path / "stacked", Wanted(layout="stacked"))
    packed, scale = BaseStore.open(tmp_path / "stacked").packed(STACK)
    assert torch.equal(packed[3], tensors[name + "_packed"])
    assert int(scale[3, 0, 0]) == 130
    assert int(mxfp4.encode(mxfp4.decode(packed[3], scale[3]))[1][0, 0]) != 130


def test_rounding_happens_only_where_it_is_asked_for(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "bf16", Wanted(dtype="bfloat16", experts="bf16"))
    store = BaseStore.open(tmp_path / "bf16")
    assert store.config.text_config.dtype == "bfloat16"
    for name, x in values(source).items():
        assert torch.equal(store.decoded(name), x.to(store.decoded(name).dtype)), name
    data = json.loads((source / "config.json").read_text())
    data["dtype"] = data["text_config"]["dtype"] = "bfloat16"
    folder = tmp_path / "claims"
    shutil.copytree(source, folder)
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(IntegrityError, match="cannot hold exactly"):
        convert(folder, tmp_path / "out", Wanted())
    assert [p.name for p in (tmp_path / "out").iterdir()] == [JOURNAL]


def test_vision_tensors_are_kept(source: Path, tmp_path: Path) -> None:
    vision = VisionConfig(vt_hidden_size=8, qkv_hidden_size=8, vt_num_hidden_layers=1, vt_intermediate_size=16,
                          init_pos_emb_height=2, init_pos_emb_width=2, text_hidden_size=48)
    tensors = {name: torch.randn(spec.shape).bfloat16() for name, spec in vision_inventory(vision).items()}
    folder = tmp_path / "model"
    folder.mkdir()
    ModelConfig(text_config=tiny().text_config, vision_config=vision).write(folder)
    save_file({"language_model." + n: x for n, x in load_file(source / WEIGHTS).items()} | tensors, folder / WEIGHTS)
    convert(folder, tmp_path / "out", Wanted(experts="f32", max_shard_bytes=SMALL))
    store = BaseStore.open(tmp_path / "out")
    assert set(tensors) < set(store.file_names())
    checkpoint = Checkpoint.open(tmp_path / "out")
    for name, x in tensors.items():
        assert torch.equal(checkpoint.read_vision(name), x)
    assert torch.equal(store.decoded(STACK), values(source)[STACK])


def test_kimi_linear_folders_convert_too(tmp_path: Path) -> None:
    write_base(tmp_path / "model", CausalLM(tiny_linear(dtype="bfloat16"), seed=1))
    convert(tmp_path / "model", tmp_path / "packed", Wanted(experts="mxfp4"))
    first = values(tmp_path / "model")[STACK]
    want = mxfp4.decode(*mxfp4.encode(first), dtype=torch.bfloat16)
    assert torch.equal(values(tmp_path / "packed")[STACK], want)


def killed(work: Callable[[], object]) -> bool:
    """Run in a forked process; whether it was killed (a failure of its own fails the test)."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except BaseException:  # noqa: BLE001 - whatever it is, the child must not go on as a second test run
            os._exit(3)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def die_after(count: int) -> Callable[..., None]:
    left = [count]

    def step(*_: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return step


def test_kills_at_any_point_end_in_the_same_bytes(source: Path, tmp_path: Path) -> None:
    wanted = Wanted(experts="mxfp4", layout="stacked", max_shard_bytes=SMALL)
    plain, target = tmp_path / "plain", tmp_path / "target"
    convert(source, tmp_path / "f32", Wanted(experts="f32"))
    convert(tmp_path / "f32", plain, wanted)
    steps: list[int] = []
    convert(tmp_path / "f32", tmp_path / "other", wanted, lambda *_: steps.append(1))

    def run_until(tensors: int) -> None:
        convert(tmp_path / "f32", target, wanted, die_after(tensors))

    for tensors in (0, len(steps) // 6, len(steps) // 5, len(steps) // 4):  # a later run has fewer steps to do
        assert killed(partial(run_until, tensors))
        assert not (target / "base-manifest.json").exists()
    convert(tmp_path / "f32", target, wanted)
    assert contents(target) == contents(plain)


def test_kills_between_any_two_syncs(source: Path, tmp_path: Path) -> None:
    """Before and after every rename: of shards, journal, configuration, index and manifest."""
    wanted = Wanted(max_shard_bytes=SMALL)
    convert(source, tmp_path / "plain", wanted)
    sync = os.fsync

    def run_until(count: int) -> None:
        die = die_after(count)

        def dying(fd: int) -> None:
            die()
            sync(fd)

        os.fsync = dying
        convert(source, tmp_path / "target", wanted)

    count, kills = 0, 0
    while killed(partial(run_until, count)):
        kills += 1
        # A run that goes on has fewer syncs before it: kill it early again, but later each time.
        count = (count + 1) % 7
        assert kills < 60
        if count == 0 and kills > 21:
            break
    convert(source, tmp_path / "target", wanted)
    assert kills > 10
    assert contents(tmp_path / "target") == contents(tmp_path / "plain")


def test_a_finished_conversion_given_again_changes_nothing(source: Path, tmp_path: Path) -> None:
    first = convert(source, tmp_path / "a", Wanted(max_shard_bytes=SMALL))
    before = contents(tmp_path / "a")
    written = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").glob("model-*")}
    assert convert(source, tmp_path / "a", Wanted(max_shard_bytes=SMALL)) == first
    assert contents(tmp_path / "a") == before
    assert {p.name: p.stat().st_mtime_ns for p in (tmp_path / "a").glob("model-*")} == written


def test_a_finished_shard_that_was_damaged_is_written_again(source: Path, tmp_path: Path) -> None:
    convert(source, tmp_path / "a", Wanted(max_shard_bytes=SMALL))
    before = contents(tmp_path / "a")
    (tmp_path / "a" / "base-manifest.json").unlink()
    shard = sorted((tmp_path / "a").glob("model-*"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    convert(source, tmp_path / "a", Wanted(max_shard_bytes=SMALL))
    assert contents(tmp_path / "a") == before


def test_a_full_disk_leaves_finished_shards_and_no_part(source: Path, tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    convert(source, tmp_path / "plain", Wanted(max_shard_bytes=SMALL))
    sync, left = os.fsync, [14]

    def full(fd: int) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        sync(fd)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        convert(source, tmp_path / "a", Wanted(max_shard_bytes=SMALL))
    names = sorted(p.name for p in (tmp_path / "a").iterdir())
    done = [row["name"] for row in json.loads((tmp_path / "a" / JOURNAL).read_text())["shards"]]
    assert done
    assert names == sorted([JOURNAL, *done])
    monkeypatch.undo()
    convert(source, tmp_path / "a", Wanted(max_shard_bytes=SMALL))
    assert contents(tmp_path / "a") == contents(tmp_path / "plain")


def test_too_little_room_is_said_before_anything_is_written(source: Path, tmp_path: Path,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1))
    with pytest.raises(CapacityError, match=r"bytes are still to be written and 1 are free"):
        convert(source, tmp_path / "a", Wanted())
    assert [p.name for p in (tmp_path / "a").iterdir()] == [JOURNAL]


def test_other_folders_are_left_alone(source: Path, tmp_path: Path) -> None:
    before = contents(source)
    with pytest.raises(InputError, match="the source itself"):
        convert(source, source / ".." / source.name, Wanted())
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="is not empty"):
        convert(source, tmp_path / "full", Wanted())
    convert(source, tmp_path / "a", Wanted())
    with pytest.raises(InputError, match="with other choices"):
        convert(source, tmp_path / "a", Wanted(layout="stacked"))
    (tmp_path / "a" / JOURNAL).write_text("{}")
    with pytest.raises(InputError, match="malformed"):
        convert(source, tmp_path / "a", Wanted())
    assert contents(source) == before
    assert contents(tmp_path / "full") == {"notes.txt": b"mine"}


@pytest.mark.parametrize(("choice", "message"), [
    ({"experts": "int4"}, "expected mxfp4, bf16, f32, keep"), ({"layout": "flat"}, "expected per-expert"),
    ({"dtype": "float16"}, "expected float32, bfloat16"), ({"max_shard_bytes": 0}, "above 0"),
])
def test_unknown_choices(choice: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Wanted(**choice)


def test_contradicting_choices(source: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the model is float32\. Add --dtype bfloat16, or choose --experts f32"):
        convert(source, tmp_path / "a", Wanted(experts="bf16"))
    assert not (tmp_path / "a").exists()
