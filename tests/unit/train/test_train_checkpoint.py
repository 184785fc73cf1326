"""Checkpoints are whole or absent; the ledger counts every prompt once."""

import resource
from pathlib import Path

import pytest
import torch

from tidemill.core.errors import InputError, IntegrityError, TrainError
from tidemill.train.checkpoint import KEEP, Checkpoint, load_newest, save
from tidemill.train.config import RunConfig, TaskSection
from tidemill.train.run_dir import SUMMARY_KEYS, RunDir, check_exactly_once, lineage


def point(step: int, size: int = 10) -> Checkpoint:
    return Checkpoint(step, {"adapter": {"x": torch.full((size,), float(step))}}, {"position": {"cursor": step * 4}})


def test_newest_valid_one_is_loaded_and_old_ones_go(tmp_path: Path) -> None:
    assert load_newest(tmp_path) is None
    for step in (5, 10, 15):
        save(tmp_path, point(step))
    assert len(list(tmp_path.iterdir())) == KEEP
    newest = load_newest(tmp_path)
    assert newest is not None
    assert (newest.step, newest.plain["position"]["cursor"]) == (15, 60)
    assert newest.tensors["adapter"]["x"].eq(15).all()


@pytest.mark.parametrize("name", ["state.pt", "state.json", "manifest.json"])
def test_a_damaged_one_is_passed_over_and_all_damaged_is_an_error(tmp_path: Path, name: str) -> None:
    for step in (5, 10):
        save(tmp_path, point(step))
    (tmp_path / "step00010" / name).write_bytes(b"{}")
    found = load_newest(tmp_path)
    assert found is not None
    assert found.step == 5
    (tmp_path / "step00005" / name).unlink()
    with pytest.raises(IntegrityError, match="no valid checkpoint"):
        load_newest(tmp_path)


def test_a_full_disk_leaves_the_previous_one(tmp_path: Path) -> None:
    save(tmp_path, point(5))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(TrainError, match="step00010"):
            save(tmp_path, point(10, size=100_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["step00005"]
    found = load_newest(tmp_path)
    assert found is not None
    assert found.step == 5


def test_leftovers_of_a_killed_writer_go(tmp_path: Path) -> None:
    save(tmp_path, point(5))
    (tmp_path / ".step00010.part").mkdir()
    (tmp_path / ".step00010.part" / "state.pt").write_bytes(b"half")
    assert load_newest(tmp_path) is not None
    assert [p.name for p in tmp_path.iterdir()] == ["step00005"]


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path, RunConfig(name="demo", task=TaskSection(name="ledger")))


def test_run_names_sort_by_time_and_hold_everything(run: RunDir, tmp_path: Path) -> None:
    later = RunDir.create(tmp_path, RunConfig(name="demo", task=TaskSection(name="ledger")))
    assert later.name >= run.name
    assert (run.path / "config.resolved.yaml").is_file()
    run.write_episodes("step-00001", [{"a": 1}, {"a": 2}])
    assert list(run.read_episodes("step-00001")) == [{"a": 1}, {"a": 2}]
    with pytest.raises(InputError, match="summary keys"):
        run.write_summary({"recipe": "x"})
    run.write_summary(dict.fromkeys(SUMMARY_KEYS))
    with pytest.raises(InputError, match="not a run folder"):
        RunDir.open(tmp_path)
    with pytest.raises(InputError, match="cannot create"):
        RunDir.create(Path("/proc/no"), RunConfig(name="demo", task=TaskSection(name="ledger")))


def test_lineage_and_exactly_once(run: RunDir) -> None:
    run.event("step", step=1, prompts=[0, 4])
    run.event("step", step=2, prompts=[4, 10])
    run.event("step", step=3, prompts=[10, 12])
    assert check_exactly_once(run) == 12
    again = RunDir.open(run.path)
    assert again.attempt == 1
    again.event("resume", from_step=1, removed=[])
    assert [r["step"] for r in lineage(again)] == [1]
    again.event("step", step=2, prompts=[4, 9])
    assert [r["attempt"] for r in lineage(again)] == [0, 1]
    assert check_exactly_once(again) == 9
    again.event("step", step=3, prompts=[8, 12])
    with pytest.raises(IntegrityError, match="step 3 used prompts 8"):
        check_exactly_once(again)
