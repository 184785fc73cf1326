"""Trainings from start to model: the same bits again, stopped, killed and shared; what is refused."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from tidemill.cli.train import app
from tidemill.core.errors import ConfigError, InputError, TrainError
from tidemill.core.files import read_jsonl
from tidemill.core.launcher import leftovers
from tidemill.model.balance import RouterBalance
from tidemill.model.base import BaseStore
from tidemill.model.causal_lm import CausalLM
from tidemill.model.chat import ChatCodec, Tokenizer, build_tokenizer
from tidemill.model.layers import RoutedExperts
from tidemill.model.presets import toy
from tidemill.parallel import GlooGroup, Group, SoloGroup
from tidemill.train.pretrain import job
from tidemill.train.pretrain.documents import conversation_document, text_document
from tidemill.train.pretrain.held_out import measure
from tidemill.train.pretrain.job import Result, execute, reopen, start
from tidemill.train.pretrain.parameters import Optimizers, OptimizerSection
from tidemill.train.pretrain.recipe import Recipe, load_recipe, recipe_names
from tidemill.train.pretrain.sources import SourceSection, open_source
from tidemill.train.run_dir import RunDir
from tidemill.train.samples import Sample, micro_batches, packed_batches
from tidemill.train.supervised import Cut, accumulate

STEPS = 6
RECIPE = """
kind: pretrain
name: small
model: {{preset: toy}}
vocabulary: {{size: 512, num_bytes: 60000}}
context: 64
batch_tokens: 256
micro_batch_tokens: 256
schedule: {{steps: {steps}, warmup: 0.4}}
held_out: {{share: 0.2, every: 3, tokens: 200, last_tokens: 400}}
mxfp4_from: 0.5
data:
  - {{name: text, licence: PSF-2.0, weight: 2, text: ["{{stdlib}}/argparse.py", "{{stdlib}}/asyncio/*.py"]}}
  - {{name: toolbox, licence: generated, weight: 1, task: {{name: toolbox}}}}
"""


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "small.yaml"
    path.write_text(RECIPE.format(steps=STEPS))
    return path


@pytest.fixture(scope="module")
def begun(recipe_file: Path, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A training that has not done a step, to be copied."""
    return start(load_recipe(str(recipe_file)), tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def whole(begun: RunDir, tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The training done in one go."""
    run = copied(begun, tmp_path_factory.mktemp("whole"))
    assert carried_on(run).stopped_by == "steps"
    return run


def copied(run: RunDir, folder: Path, **changes: Any) -> RunDir:
    """A copy of a run folder, with values of its recipe changed."""
    path = folder / run.name
    shutil.copytree(run.path, path)
    config = path / "config.resolved.yaml"
    lines = config.read_text().splitlines()
    for key, value in changes.items():
        lines = [f"{key}: {value}" if line.startswith(f"{key}:") else line for line in lines]
    config.write_text("\n".join(lines) + "\n")
    return RunDir.open(path)


def carried_on(run: RunDir, *, stop_after: int = 99) -> Result:
    """One piece of the training, asked to stop when so many of its steps are done."""
    run, recipe = reopen(run.path)
    follower = Follower()
    return execute(recipe, run, listeners=(follower,),
                   stop=lambda: "interrupted" if len(follower.steps) >= stop_after else "")


class Follower:
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_event(self, kind: str, row: Any) -> None:
        if kind == "update":
            self.steps.append(row["step"])

    def on_progress(self, phase: str, done: int, total: int) -> None:
        pass


def outcome(run: RunDir) -> tuple[str, list[float]]:
    """Digest of the model, and the losses that led to it."""
    losses = {row["step"]: row["loss"] for row in read_jsonl(run.events) if row["event"] == "update"}
    return BaseStore.open(run.path / "model").digest, [losses[step] for step in sorted(losses)]


# -- the same bits -----------------------------------------------------------------------------------------------------


def test_a_training_leaves_a_model_that_can_be_used(whole: RunDir) -> None:
    summary = json.loads((whole.path / "summary.json").read_text())
    losses = outcome(whole)[1]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert summary["tokens"] >= STEPS * 256
    text, tools = summary["held_out"]
    assert (text["source"], tools["source"]) == ("text", "toolbox")
    assert tools["bits_per_byte"] is None
    store, tokenizer = BaseStore.open(whole.path / "model"), Tokenizer.load(whole.path / "model")
    assert store.config.text_config.vocab_size == tokenizer.size == 512
    assert store.config.text_config.quantize_experts
    data = json.loads((whole.path / "data.json").read_text())
    assert data["sources"]["text"]["licence"] == "PSF-2.0"
    assert data["sources"]["text"]["held_out_bytes"] > 0
    events = [(row["event"], row.get("step")) for row in read_jsonl(whole.events)]
    assert ("held_out", 3) in events
    assert ("held_out", STEPS) in events


def test_a_second_training_has_the_same_bits(begun: RunDir, whole: RunDir, tmp_path: Path) -> None:
    again = copied(begun, tmp_path)
    carried_on(again)
    assert outcome(again) == outcome(whole)
    other = copied(begun, tmp_path / "other", seed=2)
    carried_on(other, stop_after=0)
    first = next(row["loss"] for row in read_jsonl(other.events) if row["event"] == "update")
    assert first != outcome(whole)[1][0]


def test_stopped_it_has_done_no_more_than_the_step_it_was_in_and_ends_with_the_same_bits(
    begun: RunDir, whole: RunDir, tmp_path: Path,
) -> None:
    run = copied(begun, tmp_path)
    for last in (2, 4):
        result = carried_on(run, stop_after=1)
        assert (result.stopped_by, result.step, result.model) == ("interrupted", last, None)
    assert carried_on(run).model == run.path / "model"
    assert outcome(run) == outcome(whole)


def test_killed_it_goes_on_from_its_last_checkpoint_with_the_same_bits(
    begun: RunDir, whole: RunDir, tmp_path: Path,
) -> None:
    run = copied(begun, tmp_path, checkpoint_s="1.0e-9")
    code = ("import sys, os, signal\nfrom pathlib import Path\n"
            "from tidemill.train.pretrain.job import execute, reopen\n"
            "class Kill:\n"
            "    def on_event(self, kind, row):\n"
            "        if kind == 'update' and row['step'] == 4: os.kill(os.getpid(), signal.SIGKILL)\n"
            "    def on_progress(self, *args): pass\n"
            "run, recipe = reopen(Path(sys.argv[1]))\nexecute(recipe, run, listeners=(Kill(),))\n")
    ended = subprocess.run([sys.executable, "-c", code, str(run.path)], check=False, timeout=100)
    assert ended.returncode == -signal.SIGKILL
    (run.checkpoints / ".step00004.part").mkdir()
    assert carried_on(run).stopped_by == "steps"
    assert [row["from_step"] for row in read_jsonl(run.events) if row["event"] == "resume"] == [3]
    assert outcome(run) == outcome(whole)


def in_threads(run: RunDir, meeting: Path) -> dict[str, Tensor]:
    """What two ranks make of a training, each in a thread of this process."""
    run, recipe = reopen(run.path)

    def rank(number: int) -> dict[str, Tensor]:
        group = GlooGroup(meeting, rank=number, size=2)
        try:
            return job._Rank(recipe, run, group, None).train(lambda: False)[0].state_dict()
        finally:
            group.close()

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert all(torch.equal(x, second[name]) for name, x in first.items())
    return first


def test_a_lost_rank_ends_the_training_and_it_goes_on_with_the_same_bits(begun: RunDir, tmp_path: Path) -> None:
    run, recipe = reopen(copied(begun, tmp_path, ranks=2, checkpoint_s="1.0e-9").path)

    class Kill(Follower):
        def on_event(self, kind: str, row: Any) -> None:
            if kind == "update" and row["step"] == 2:
                for _, pid in leftovers(run.ledger):
                    os.kill(pid, signal.SIGKILL)

    with pytest.raises(TrainError, match="the training lost one of its 2 ranks"):
        execute(recipe, run, listeners=(Kill(),))
    assert not leftovers(run.ledger)
    assert list(run.checkpoints.iterdir())
    resumed = in_threads(run, tmp_path / "meeting")
    whole = in_threads(copied(begun, tmp_path / "whole", ranks=2), tmp_path / "another")
    assert all(torch.equal(x, resumed[name]) for name, x in whole.items())


def test_a_branch_ends_early_and_leaves_the_training_it_came_from_alone(begun: RunDir, whole: RunDir,
                                                                         tmp_path: Path) -> None:
    run = copied(begun, tmp_path)
    carried_on(run, stop_after=1)
    before = sorted(p.relative_to(run.path) for p in run.path.rglob("*"))
    command = CliRunner().invoke(app, ["pretrain", "--branch", str(run.path), "--runs-dir", str(tmp_path / "more"),
                                       "--set", "schedule.steps=4", "--json"])
    told = json.loads(command.stdout)
    assert (told["stopped_by"], told["step"]) == ("steps", 4)
    steps = [row["step"] for row in read_jsonl(Path(told["run"]) / "events.jsonl") if row["event"] == "update"]
    assert steps == [3, 4]
    assert json.loads((Path(told["model"]) / "data.json").read_text())["branched_from"] == {"run": run.name, "step": 2}
    assert sorted(p.relative_to(run.path) for p in run.path.rglob("*")) == before
    for change, why in (("schedule.steps=2", "checkpoint is at step 2 of 2"), ("model.preset=tiny", "model cannot")):
        with pytest.raises(InputError, match=why):
            job.branch(run.path, [change], tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


# -- a step ------------------------------------------------------------------------------------------------------------

TOKENIZER = build_tokenizer()
CODEC = ChatCodec(TOKENIZER)


def documents() -> list[Sample]:
    text = text_document("It was a bright cold day in April. " * 4, TOKENIZER, is_end=True)
    row = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]}
    return [*text.pieces(48), *conversation_document(row, CODEC, where="here").pieces(48)]


def packed(max_tokens: int) -> Cut:
    return partial(packed_batches, max_tokens=max_tokens)


def padded(max_tokens: int) -> Cut:
    return partial(micro_batches, max_tokens=max_tokens)


def gradients(model: CausalLM, samples: list[Sample], *, cut: Cut,
              group: Group | None = None) -> tuple[float, dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    balance = RouterBalance(model)
    loss, _ = accumulate(model, balance, samples, group or SoloGroup(), cut=cut, stop=lambda: False)
    balance.apply()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    biases = {name: b.clone() for name, b in model.state_dict().items() if name.endswith("e_score_correction_bias")}
    assert biases
    return loss, found | biases


def fresh() -> CausalLM:
    return CausalLM(toy(TOKENIZER.size, dtype="float32"), seed=1)


def close(one: tuple[float, dict[str, Tensor]], other: tuple[float, dict[str, Tensor]]) -> None:
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert one[1].keys() <= other[1].keys()  # ranks fill in zeros for what is not used
    for name, x in one[1].items():
        error = float((x - other[1][name]).norm() / (1e-6 + x.norm()))
        assert error < 1e-6 or float((x - other[1][name]).abs().max()) < 1e-7, (name, error)


@pytest.mark.parametrize("cut", [packed(1), packed(100), padded(10_000), padded(100)])
def test_loss_gradients_and_biases_do_not_depend_on_how_a_batch_is_cut_and_packed(cut: Cut) -> None:
    samples = documents()
    whole = gradients(fresh(), samples, cut=packed(10_000))
    close(whole, gradients(fresh(), samples[::-1], cut=cut))


def test_ranks_share_a_step_and_all_stop_when_one_wants_to(tmp_path: Path) -> None:
    samples = documents()
    alone = gradients(fresh(), samples, cut=packed(10_000))

    def rank(number: int) -> tuple[tuple[float, dict[str, Tensor]], bool]:
        group = GlooGroup(tmp_path / "meeting", rank=number, size=2, meet_s=20, wait_s=20)
        try:
            found = gradients(fresh(), samples, cut=packed(10_000), group=group)
            model = fresh()
            _, stopping = accumulate(model, RouterBalance(model), samples, group, cut=packed(10_000),
                                     stop=lambda: number == 1)
            return found, stopping
        finally:
            group.close()

    with ThreadPoolExecutor(2) as pool:
        (first, stops), (second, stops_too) = pool.map(rank, range(2))
    assert stops
    assert stops_too
    assert all(torch.equal(x, second[1][name]) for name, x in first[1].items())
    close(alone, first)


def test_one_batch_can_be_learned_by_heart() -> None:
    model, samples = fresh(), documents()[-2:]
    model.set_quantization("weights")
    optimizers, balance = Optimizers(model, OptimizerSection(lr=0.03)), RouterBalance(model)
    loss = math.inf
    for _ in range(18):
        optimizers.zero_grad()
        loss, _ = accumulate(model, balance, samples, SoloGroup(), cut=packed(10_000), stop=lambda: False)
        optimizers.clip()
        optimizers.step(1.0)
        balance.apply()
    assert loss < 0.05


def test_bits_per_byte_are_those_of_the_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("A small text, héld out.\n" * 9)
    (tmp_path / "b.txt").write_text("other")
    section = SourceSection(name="a", licence="none", weight=1, text=(f"{tmp_path}/*.txt",))
    source = next(s for share in range(1, 100) if (s := held(section, share / 100)) is not None)
    model = fresh()
    found = measure(model, source, context=32, max_tokens=10**6, cut=packed(100), end_id=TOKENIZER.control.eos,
                    group=SoloGroup())
    nats, num_bytes = 0.0, 0
    with torch.no_grad():
        for item in source.held_out():
            num_bytes += item.num_bytes
            for piece in item.document.pieces(32):
                logp = model(torch.tensor([piece.ids])).log_softmax(-1)[0]
                nats -= sum(float(logp[t - 1, piece.ids[t]]) for t in range(1, len(piece.ids))
                            if piece.ids[t] != TOKENIZER.control.eos)
    assert found.num_bytes == num_bytes
    assert found.bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-5)


def held(section: SourceSection, share: float) -> Any:
    """The source, if this share holds something out and leaves something."""
    try:
        source = open_source(section, CODEC, seed=0, held_out=share, context=32)
    except ConfigError:
        return None
    return source if any(True for _ in source.held_out()) else None


@pytest.mark.parametrize("scheme", ["weights", "weights+activations"])
def test_experts_are_rounded_from_the_step_the_recipe_names(begun: RunDir, tmp_path: Path, scheme: str,
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    before = RoutedExperts.forward

    def forward(self: RoutedExperts, *args: Any) -> Tensor:
        seen.append(self.quantization)
        return before(self, *args)

    monkeypatch.setattr(RoutedExperts, "forward", forward)
    run = copied(begun, tmp_path, quantization=scheme)
    carried_on(run, stop_after=2)
    assert set(seen) == {"none"}
    seen.clear()
    carried_on(run)
    assert set(seen) == {scheme}


def test_a_loss_that_is_not_finite_ends_the_training_and_spoils_no_checkpoint(
    begun: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = copied(begun, tmp_path)
    carried_on(run, stop_after=1)
    held = sorted(p.name for p in run.checkpoints.iterdir())

    def spoiled(*args: Any, **kwargs: Any) -> tuple[float, bool]:
        accumulate(*args, **kwargs)
        return math.nan, False

    monkeypatch.setattr(job, "accumulate", spoiled)
    with pytest.raises(TrainError, match=r"step 3: loss nan.*not finite.*Lower optimizer\.lr"):
        carried_on(run)
    assert sorted(p.name for p in run.checkpoints.iterdir()) == held


# -- fine-tuning -------------------------------------------------------------------------------------------------------


def test_fine_tuning_goes_on_from_a_model_and_learns_conversations(whole: RunDir, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": word}]}
            for word in ("oak", "fir")]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "tune.yaml"
    recipe.write_text(f"kind: sft\nname: tune\ninit: {whole.path / 'model'}\ncontext: 64\nbatch_tokens: 64\n"
                      "schedule: {steps: 12}\noptimizer: {lr: 0.01}\nheld_out: {share: 0}\n"
                      f"data: [{{name: talk, licence: none, weight: 1, conversations: ['{tmp_path}/talk.jsonl']}}]\n")
    run = start(load_recipe(str(recipe), kind="sft"), tmp_path / "runs")
    assert carried_on(run).model is not None
    losses = outcome(run)[1]
    assert losses[-1] < 0.5 * losses[0]
    tokenizer, before = Tokenizer.load(run.path / "model"), Tokenizer.load(whole.path / "model")
    assert tokenizer.digest == before.digest


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "told"), [
    ("kind=sft", "no init|a model to go on from"),
    ("init=there", "no init"),
    ("model.preset=huge", "model.preset"),
    ("context=1", "context"),
    ("context=5000", "the model takes"),
    ("schedule.steps=0", "steps"),
    ("optimizer.lr=0", "lr"),
    ("held_out.share=1", "held_out.share"),
    ("mxfp4_from=2", "mxfp4_from"),
    ("quantization=none", "quantization"),
    ("data=[]", "at least one source"),
    ("wisdom=1", "wisdom: unknown key"),
    ("vocabulary.size=100", "vocabulary.size"),
])
def test_a_bad_recipe_is_refused_and_leaves_no_folder(recipe_file: Path, tmp_path: Path, change: str,
                                                      told: str) -> None:
    with pytest.raises(InputError, match=told):
        start(load_recipe(str(recipe_file), ["vocabulary.num_bytes=20000", change]), tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_packaged_recipes_are_valid() -> None:
    assert "nano" in recipe_names("pretrain")
    for name in recipe_names():
        assert isinstance(load_recipe(name), Recipe)
    with pytest.raises(ConfigError, match="tidemill train pretrain"):
        load_recipe("nano", kind="sft")
    with pytest.raises(ConfigError, match="neither a file nor one of nano"):
        load_recipe("nothing")


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_trains_and_goes_on(recipe_file: Path, tmp_path: Path) -> None:
    command = CliRunner()
    dry = command.invoke(app, ["pretrain", str(recipe_file), "--dry-run", "--json"])
    assert json.loads(dry.stdout)["tokens"] == STEPS * 256
    first = command.invoke(app, ["pretrain", str(recipe_file), "--runs-dir", str(tmp_path), "--for", "0.001s",
                                 "--json"])
    told = json.loads(first.stdout)
    assert (first.exit_code, told["stopped_by"], told["step"], told["model"]) == (0, "time", 1, None)
    done = command.invoke(app, ["pretrain", "--resume", "last", "--runs-dir", str(tmp_path)])
    assert done.exit_code == 0
    assert "bits per byte" in done.stdout
    assert "resumed from step 1" in done.stderr
    over = command.invoke(app, ["pretrain", "--resume", told["run"]])
    assert isinstance(over.exception, ConfigError)
    assert "has ended" in str(over.exception)


@pytest.mark.parametrize(("arguments", "told"), [
    (["pretrain"], "give one of: a recipe, --resume RUN, --branch RUN"),
    (["pretrain", "nano", "--branch", "last"], "give one of"),
    (["pretrain", "nano", "--for", "soon"], "--for 'soon'"),
    (["pretrain", "--resume", "nothing"], "neither a training's folder"),
    (["pretrain", "--resume", "last", "--seed", "2"], "do not fit"),
    (["sft", "nano"], "expected 'sft'"),
])
def test_the_command_refuses(arguments: list[str], told: str, tmp_path: Path) -> None:
    found = CliRunner().invoke(app, [*arguments, "--runs-dir", str(tmp_path)])
    assert told in str(found.exception)


def test_ctrl_c_ends_the_command_within_a_step(begun: RunDir, tmp_path: Path) -> None:
    run = copied(begun, tmp_path)
    before = signal.getsignal(signal.SIGINT)
    config = run.path / "config.resolved.yaml"
    config.write_text(config.read_text().replace(f"steps: {STEPS}", "steps: 9999"))

    def interrupt() -> None:
        wait_for(lambda: any(row["event"] == "update" for row in read_jsonl(run.events)))
        os.kill(os.getpid(), signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(interrupt)
        found = CliRunner().invoke(app, ["pretrain", "--resume", str(run.path)])
        waiting.result()
    assert found.exit_code == 130
    assert f"go on with: tidemill train pretrain --resume {run.path}" in found.stderr
    rows = list(read_jsonl(run.events))
    last = max(row["step"] for row in rows if row["event"] == "update")
    assert rows[-1]["event"] == "stop"
    assert rows[-1]["step"] == last
    assert (run.checkpoints / f"step{last:05d}").is_dir()
    assert signal.getsignal(signal.SIGINT) is before


def wait_for(ready: Callable[[], bool], *, timeout_s: float = 60.0) -> None:
    until = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < until
        time.sleep(0.05)
