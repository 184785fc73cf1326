"""Events reach the files, TensorBoard and listeners; the views print them."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_folder import CONFIG, step_row, write_run
from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto import event_pb2

from tidemill.core.files import read_jsonl
from tidemill.train import live
from tidemill.train.metrics import Metrics, scalars
from tidemill.train.run_dir import RunDir


class Spy:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Any]] = []

    def on_event(self, kind: str, row: Mapping[str, Any]) -> None:
        self.seen.append((kind, row.get("step")))

    def on_progress(self, phase: str, done: int, total: int) -> None:
        self.seen.append((phase, (done, total)))


def test_events_go_everywhere(tmp_path: Path) -> None:
    run, spy = RunDir.create(tmp_path, CONFIG), Spy()
    with Metrics(run, listeners=[spy]) as metrics:
        metrics.event("step", **step_row(1, 0, 8))
        metrics.canary({"step": 1, "version": 2, "mean_diff": 1e-7})
        metrics.progress("generate", 3, 9)
    metrics.close()
    rows = list(read_jsonl(run.events))
    assert [(r["event"], r["attempt"], r["step"]) for r in rows] == [("step", 0, 1)]
    assert rows[0]["t"] >= 0
    assert [r["version"] for r in read_jsonl(run.path / "canary.jsonl")] == [2]
    assert spy.seen == [("step", 1), ("canary", 1), ("generate", (3, 9))]
    (file,) = (run.path / "tensorboard").iterdir()
    found: dict[str, tuple[int, float]] = {}
    for raw in RawEventFileLoader(str(file)).Load():
        event = event_pb2.Event.FromString(raw)
        found |= {v.tag: (event.step, v.simple_value) for v in event.summary.value}
    assert found["reward/mean"] == (1, pytest.approx(0.1))
    assert found["time/generate"] == (1, 2.0)
    assert found["drops/all_equal"] == (1, 5.0)
    assert found["canary/mean_diff"][0] == 1


def test_scalars_leave_out_what_is_absent_or_no_number() -> None:
    assert scalars("eval", {"split": "dev", "accuracy": 0.5}) == {"accuracy/dev": 0.5}
    assert scalars("warmup", {"loss": None, "accuracy": True}) == {}
    assert scalars("state", {"old": "a"}) == {}


def test_plain_view_prints_one_line_per_event_worth_one(tmp_path: Path) -> None:
    stream = io.StringIO()
    with live.make_view(stream) as view:
        assert isinstance(view, live.PlainView)
        for row in read_jsonl(write_run(tmp_path).events):
            view.on_event(row["event"], row)
        view.on_event("canary", {"version": 4, "fires": "co-movement", "trainer_moved": 0.1, "missed": 0.1})
        view.on_progress("generate", 1, 2)
    lines = stream.getvalue().splitlines()
    assert any("step   3/3" in line and "kl 1.0e-09" in line and "2,000 tok/s" in line for line in lines)
    assert any("stopped early on purpose after 3 steps" in line for line in lines)
    assert any("resumed from step 1; removed: engine (pid 7)" in line for line in lines)
    assert lines[-1].startswith("CANARY v4: co-movement")


def test_rich_view_draws_and_keeps_lines(tmp_path: Path) -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=100, color_system=None)
    with live.RichView(console) as view:
        for row in read_jsonl(write_run(tmp_path).events):
            view.on_event(row["event"], row)
        view.on_event("state", {"new": "generate"})
        view.on_progress("generate", 17, 64)
        view._live.refresh()
    text = stream.getvalue()
    assert "dev accuracy at step 0: 25.0%" in text
    assert "generate 17/64" in text
    assert "192 sandbox calls" in text or "256 sandbox calls" in text


def test_eta_and_formats() -> None:
    now = iter([0.0, 10.0, 20.0])
    eta = live.Eta(lambda: next(now))
    assert eta.after(1, 5) is None
    assert eta.after(2, 5) == 30.0
    assert eta.after(3, 5) == 20.0
    assert live.clock(187.4) == "3:07"
    assert live.sparkline([0.0, 0.5, 1.0, 2.0, -1.0]) == "▁▅██▁"
