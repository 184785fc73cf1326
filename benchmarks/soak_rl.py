"""Long checks of the RL loop: `make soak ONLY=rl`.

Thirty kill -9 at random points of small 20-step runs, each resumed to the very adapter of the uninterrupted run with
every prompt counted once; every control of the demonstration's recipe against real sandboxes; twenty short live runs in
which the canary must stay silent. Writes benchmarks/soak/rl.json. KILLS and LIVE lower the counts.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness import ROOT, conclude, write_soak

sys.path.insert(0, str(ROOT / "tests/unit/train"))

RECIPE = "toolcalc"
KILLS, LIVE, LIVE_STEPS = 30, 20, 5
STEPS, KILLS_PER_RUN = 20, 10
CONTROLS = ("frozen-engine", "zero-scale", "bit-flip", "random-reward")


def kills(count: int, folder: Path) -> dict[str, Any]:
    """`count` kills, a few per run. Raises AssertionError if a resumed run differs from the uninterrupted one."""
    from loop_world import kill_and_resume, run_once

    whole = run_once(folder / "whole/runs", folder / "whole/boxes", rl__max_steps=STEPS)
    hits = runs = 0
    while hits < count:
        runs += 1
        kills_left = min(KILLS_PER_RUN, count - hits)
        hits += kill_and_resume(whole, folder / f"run{runs}", kills=kills_left, seed=1000 + runs, rl__max_steps=STEPS)
        print(f"{hits} of {count} kills, {runs} runs equal to the uninterrupted one", file=sys.stderr, flush=True)
    return {"kills": hits, "runs": runs, "steps_each": STEPS, "bit_equal": runs, "exactly_once": runs}


def rl(runs: Path, *args: str) -> tuple[int, dict[str, Any]]:
    """Exit code and JSON of one `tidemill rl run`."""
    argv = [sys.executable, "-m", "tidemill.cli.main", "rl", "run", "--json", "--runs-dir", str(runs), *args]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}


def on_base(base: Path, runs: Path, *args: str, seed: int, overrides: Sequence[str] = ()) -> tuple[int, dict[str, Any]]:
    """A run of the recipe that takes a base warmed up before instead of warming up again."""
    from tidemill.train.config import load_recipe
    from tidemill.train.run import start

    run = start(load_recipe(RECIPE, overrides, seed=seed), runs)
    shutil.copytree(base, run.base)
    return rl(runs, "--resume", str(run.path), *args)


def controls(folder: Path) -> tuple[dict[str, Any], Path]:
    """Every control of the recipe: its verdict and what happened. Also the base they shared."""
    found: dict[str, Any] = {}
    base: Path | None = None
    for name in CONTROLS:
        args = ("--control", name)
        code, out = rl(folder, RECIPE, *args) if base is None else on_base(base, folder, *args, seed=1)
        base = base or Path(out["run"]) / "base"
        verdict = out.get("control") or {}
        found[name] = {"exit_code": code, "behaved": bool(verdict.get("behaved")), "why": verdict.get("why", "")}
        print(f"control {name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    assert base is not None
    return found, base


def live(base: Path, count: int, folder: Path) -> dict[str, Any]:
    """Short live runs with different seeds from one base; an alarm is a canary row that fires, whether or not it stops
    the run. A step that moved nothing would be no test of the canary, so those are counted too."""
    alarms = finished = readings = moved = 0
    overrides = (f"rl.max_steps={LIVE_STEPS}", "eval.test_n=64", "eval.dev_n=64", "eval.stop_at=2.0",
                 "warmup.band=[0.0, 1.0]")
    for seed in range(100, 100 + count):
        code, out = on_base(base, folder, seed=seed, overrides=overrides)
        if code == 0:
            finished += 1
            lines = (Path(out["run"]) / "canary.jsonl").read_text().splitlines()
            rows: list[dict[str, Any]] = [json.loads(line) for line in lines]
            alarms += sum(bool(row["fires"]) for row in rows)
            readings += len(rows)
            moved += sum(row["trainer_moved"] > row["threshold"] for row in rows)
        print(f"live seed {seed}: exit code {code}; {alarms} alarms so far", file=sys.stderr, flush=True)
    return {"runs": count, "finished": finished, "steps_each": LIVE_STEPS, "readings": readings,
            "readings_that_moved": moved, "alarms": alarms}


def main() -> None:
    """Run, write, print, exit."""
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="tidemill-soak-") as name:
        folder = Path(name)
        killed = kills(int(os.environ.get("KILLS", KILLS)), folder / "kills")
        planted, base = controls(folder / "controls")
        found = live(base, int(os.environ.get("LIVE", LIVE)), folder / "live")
    met = (all(c["behaved"] for c in planted.values()) and found["alarms"] == 0
           and found["finished"] == found["runs"] and found["readings_that_moved"] > 0)
    result = {"kills": killed, "controls": planted, "live": found, "met": met}
    path = write_soak("rl", killed["kills"], result, started=started)
    conclude(f"rl: {json.dumps(result)}", path, met=met)
