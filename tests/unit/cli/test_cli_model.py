"""`tidemill model` as a user calls it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tidemill.cli.main import main
from tidemill.engine.random_model import write_random_model
from tidemill.model.base import BaseStore


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("cli") / "toy"
    write_random_model("toy", made)
    return made


def run(*arguments: str) -> None:
    with pytest.raises(SystemExit) as e:
        main(["model", *arguments])
    assert e.value.code == 0


def test_info_of_a_preset(capsys: pytest.CaptureFixture[str]) -> None:
    run("info", "mini")
    out = capsys.readouterr().out
    assert "32,199,456" in out
    assert "Apache-2.0" in out
    assert "GiB" not in out


def test_info_as_json_with_a_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("info", str(folder), "--gpus", "2", "--mem", "1", "--json")
    data = json.loads(capsys.readouterr().out)
    assert data["total"] == sum(data["components"].values())
    assert data["total_bytes"] == sum(t.nbytes for t in BaseStore.open(folder).manifest.tensors)
    assert data["plan"]["fits"] is True
    assert data["plan"]["gpus_needed"] == 2


def test_info_says_when_it_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    run("info", "small", "--gpus", "1", "--mem", "0.25")
    assert "It does not fit: " in capsys.readouterr().out
    run("info", "small", "--gpus", "1", "--mem", "24")
    assert "It fits." in capsys.readouterr().out


def test_convert(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("convert", str(folder), str(tmp_path / "a"), "--experts", "f32", "--layout", "stacked", "--shard-bytes",
        "64KiB")
    store = BaseStore.open(tmp_path / "a")
    assert store.digest in capsys.readouterr().out
    assert len(list((tmp_path / "a").glob("model-*.safetensors"))) > 3
    assert (tmp_path / "a" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_gguf_and_back(folder: Path, tmp_path: Path) -> None:
    run("convert", str(folder), str(tmp_path / "a.gguf"), "--to", "gguf", "--no-tokenizer")
    run("convert", str(tmp_path / "a.gguf"), str(tmp_path / "back"))
    before, after = BaseStore.open(folder), BaseStore.open(tmp_path / "back")
    name = "model.layers.1.block_sparse_moe.experts.w1"
    assert all(torch.equal(a, b) for a, b in zip(before.packed(name), after.packed(name), strict=True))


@pytest.mark.parametrize(("arguments", "message"), [
    (["info", "nowhere"], "neither a preset"),
    (["convert", "nowhere", "x"], "nowhere does not exist"),
    (["convert", "a", "b", "--to", "onnx"], "expected hf or gguf"),
    (["convert", ".", "b", "--experts", "int4"], "expected mxfp4"),
    (["convert", ".", "b", "--shard-bytes", "auto"], "expected bytes"),
    (["convert", ".", "b"], "cannot read config.json"),
    (["merge", ".", "a", "b"], "cannot read config.json"),
])
def test_bad_input_is_one_line_and_exit_code_2(arguments: list[str], message: str, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch,
                                               capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as e:
        main(["model", *arguments])
    assert e.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
