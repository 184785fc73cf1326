"""Whole runs on a tiny model: kills and resumes, controls, infrastructure failures, refusals."""

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest
from loop_world import FileSandboxes, begin, child, kill_and_resume, resume, run_once, sandboxes

from tidemill.core.errors import SandboxDiedError, SetupError, TrainError
from tidemill.core.files import read_jsonl
from tidemill.train.run import Result, execute
from tidemill.train.run_dir import RunDir, check_exactly_once

pytestmark = pytest.mark.xdist_group("rl-loop")
"""One worker runs all of them, since they share one warmed-up base."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """An uninterrupted run; the others borrow its base."""
    folder = tmp_path_factory.mktemp("whole")
    return run_once(folder / "runs", folder / "boxes")


def test_a_run_leaves_everything_it_promises_and_nothing_else(whole: Result) -> None:
    for name in ("config.resolved.yaml", "env.json", "data.json", "events.jsonl", "canary.jsonl", "report.html",
                 "summary.json", "episodes/step-00001.jsonl.zst", "episodes/test-00000.jsonl.zst"):
        assert (whole.path / name).is_file(), name
    summary = json.loads((whole.path / "summary.json").read_text())
    assert summary == whole.summary
    assert (summary["steps"], summary["syncs"], summary["syncs_verified"]) == (6, 7, 7)
    assert (summary["stopped_by"], summary["sandboxes_used"], summary["sandboxes_left"]) == ("steps", 2, 0)
    assert summary["kl_last"] <= 1e-5
    run = RunDir.open(whole.path)
    tests = [row for row in read_jsonl(run.events) if row["event"] == "eval" and row["split"] == "test"]
    assert [row["step"] for row in tests] == [0, 6]
    chain = ""
    for version in range(1, 8):
        manifest = json.loads((run.adapters / f"v{version:04d}" / "adapter-manifest.json").read_text())
        assert manifest["previous"] == chain
        chain = manifest["manifest_sha256"]
    assert chain == summary["head_digest"]
    assert all(row["fires"] == "" for row in read_jsonl(run.path / "canary.jsonl"))
    numbers = [r["problem_id"] for step in range(1, 7) for r in run.read_episodes(f"step-{step:05d}")]
    assert len(set(numbers)) == check_exactly_once(run)


@pytest.mark.timeout(900)
def test_killed_at_ten_points_and_resumed_it_is_the_same_run(whole: Result, tmp_path: Path) -> None:
    twenty = run_once(tmp_path / "whole" / "runs", tmp_path / "whole" / "boxes", whole.path / "base", rl__max_steps=20)
    assert kill_and_resume(twenty, tmp_path / "killed", kills=10, seed=1, rl__max_steps=20) == 10


@pytest.mark.timeout(400)
def test_interrupted_it_ends_in_order_and_can_go_on(whole: Result, tmp_path: Path) -> None:
    runs, boxes = tmp_path / "runs", tmp_path / "boxes"
    process = child("start", runs, boxes, whole.path / "base")
    while process.poll() is None and not list(runs.glob("*/episodes/step-00001*")):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    (path,) = runs.iterdir()
    assert not list(boxes.glob("*/sb-*"))
    assert not (path / "summary.json").exists()
    assert (path / "report.html").is_file()
    assert resume(path, boxes).summary["head_digest"] == whole.summary["head_digest"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("call", [3, 60])
def test_interrupted_in_an_evaluation_it_ends_there_and_goes_on_to_the_same_weights(
        whole: Result, tmp_path: Path, call: int) -> None:
    """Call 3 falls into the first look at the test split."""
    boxes = tmp_path / "boxes"

    def interrupt(number: int) -> None:
        if number == call:
            os.kill(os.getpid(), signal.SIGINT)

    result = run_once(tmp_path / "runs", boxes, whole.path / "base", on_call=interrupt)
    assert result.stopped_by == "interrupted"
    assert not list(boxes.glob("*/sb-*"))
    looks = [r for r in read_jsonl(result.path / "events.jsonl") if r["event"] == "eval"]
    assert len(looks) == (0 if call == 3 else 2)
    assert resume(result.path, boxes).summary["head_digest"] == whole.summary["head_digest"]


@pytest.mark.parametrize("control", ["frozen-engine", "zero-scale", "bit-flip", "random-reward"])
def test_controls_behave_as_the_recipe_says(whole: Result, tmp_path: Path, control: str) -> None:
    result = run_once(tmp_path / "runs", tmp_path / "boxes", whole.path / "base", control=control,
                      **{"controls__random-reward": "{steps: 2, expect: flat, tolerance: 0.6}"})
    assert result.control is not None
    assert result.control.behaved, result.control.why
    assert json.loads((result.path / "controls" / f"{control}.json").read_text())["behaved"] is True
    assert result.summary["sandboxes_left"] == 0
    if control != "random-reward":
        assert result.summary["steps"] <= 3


def test_dead_sandboxes_are_masked_and_counted(whole: Result, tmp_path: Path) -> None:
    def die(call: int) -> None:
        if call % 5 == 0:
            raise SandboxDiedError("planted")

    result = run_once(tmp_path / "runs", tmp_path / "boxes", whole.path / "base", on_call=die, rl__max_steps=2)
    assert result.stopped_by == "steps"
    run = RunDir.open(result.path)
    rows = [r for p in run.path.glob("episodes/*") for r in run.read_episodes(p.name.removesuffix(".jsonl.zst"))]
    dead = [r for r in rows if r["outcome"] == "infra_error"]
    assert dead
    assert all(r["reward"] is None and "planted" in r["error"] for r in dead)
    assert result.summary["infra_errors"] == len(dead)


def test_rl_does_not_start_outside_the_band(whole: Result, tmp_path: Path) -> None:
    run, settings = begin(tmp_path / "runs", whole.path / "base", warmup__band=[0.97, 1.0], warmup__stop_at=0.98)
    with pytest.raises(TrainError, match="outside this recipe's band of 97% to 100%: there would be nothing to learn"):
        asyncio.run(execute(settings, run, sandboxes=sandboxes(tmp_path / "boxes")))
    assert not list((tmp_path / "boxes").glob("*/sb-*"))
    assert [r["new"] for r in read_jsonl(run.events) if r["event"] == "state"][-1] == "failed"


def test_a_sandbox_that_cannot_be_made_is_missed_before_the_warm_up(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def create(self: FileSandboxes, **wanted: object) -> None:
        raise SetupError("no template", remedy="Make one.")

    monkeypatch.setattr(FileSandboxes, "create", create)
    with pytest.raises(SetupError, match="no template"):
        run_once(tmp_path / "runs", tmp_path / "boxes")
    (path,) = (tmp_path / "runs").iterdir()
    assert not any(row["event"] == "warmup" for row in read_jsonl(path / "events.jsonl"))
