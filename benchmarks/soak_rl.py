"""Long checks of the RL loop: `make soak ONLY=rl`.

Thirty kill -9 at random points of small 20-step runs, each resumed to the very adapter of the uninterrupted run with
every prompt counted once; every control of the demonstration's recipe against real sandboxes; twenty short live runs in
which the canary must stay silent. Writes benchmarks/soak/rl.json. KILLS, LIVE and CONTROLS=0 lower the counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import ROOT, write_soak

sys.path.insert(0, str(ROOT / "tests/unit/train"))

KILLS, LIVE, LIVE_STEPS = 30, 20, 6
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
    """Exit code and JSON of one `tidemill rl run toolcalc`."""
    command = ("rl", "run", "toolcalc", "--json", "--runs-dir", str(runs))
    argv = [sys.executable, "-m", "tidemill.cli.main", *command, *args]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout.strip() else {}


def controls(folder: Path) -> dict[str, Any]:
    """Every control of the recipe: its verdict and what happened."""
    found: dict[str, Any] = {}
    for name in CONTROLS:
        code, out = rl(folder, "--control", name)
        verdict = out.get("control") or {}
        found[name] = {"exit_code": code, "behaved": bool(verdict.get("behaved")), "why": verdict.get("why", "")}
    return found


def live(count: int, folder: Path) -> dict[str, Any]:
    """Short live runs with different seeds; an alarm is a canary row that fires, whether or not it stops the run."""
    alarms = finished = 0
    for seed in range(100, 100 + count):
        code, out = rl(folder, "--seed", str(seed), "--set", f"rl.max_steps={LIVE_STEPS}", "--set", "eval.test_n=64",
                       "--set", "eval.dev_n=64", "--set", "warmup.band=[0.0, 1.0]")
        if code == 0:
            finished += 1
            rows = (Path(out["run"]) / "canary.jsonl").read_text().splitlines()
            alarms += sum(bool(json.loads(row)["fires"]) for row in rows)
    return {"runs": count, "finished": finished, "steps_each": LIVE_STEPS, "alarms": alarms}


def main() -> None:
    """Run, write, print, exit."""
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="tidemill-soak-") as name:
        folder = Path(name)
        result: dict[str, Any] = {"kills": kills(int(os.environ.get("KILLS", KILLS)), folder / "kills")}
        if os.environ.get("CONTROLS", "1") != "0":
            result["controls"] = controls(folder / "controls")
        result["live"] = live(int(os.environ.get("LIVE", LIVE)), folder / "live")
    found = result["live"]
    met = (all(c["behaved"] for c in result.get("controls", {}).values()) and found["alarms"] == 0
           and found["finished"] == found["runs"])
    path = write_soak("rl", result["kills"]["kills"], result | {"met": met}, started=started)
    print(f"rl: {json.dumps(result)} -> {'met' if met else 'MISSED'}; {path}")
    if not met:
        sys.exit(1)
