"""Pretraining at full size: `make soak ONLY=pretrain`.

Twenty steps of nano's recipe, twice with one seed: losses and model must be equal bit for bit. Then the same twenty
steps with kill -9 at random moments, resumed each time: equal again. Writes benchmarks/soak/pretrain.json. STEPS and
KILLS lower the counts. Needs the packages the recipe names.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import conclude, write_soak

STEPS, KILLS = int(os.environ.get("STEPS", "20")), int(os.environ.get("KILLS", "10"))
SEED = 7


def command(runs: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "tidemill.cli.main", "train", "pretrain", "--runs-dir", str(runs), "--json", *args]


def fresh(runs: Path) -> list[str]:
    """The command of one training."""
    changes = [f"schedule.steps={STEPS}", "held_out.last_tokens=2000", "checkpoint_s=0.001", "mxfp4_from=0.5"]
    return command(runs, "nano", "--seed", str(SEED), *(x for change in changes for x in ("--set", change)))


def outcome(run: Path) -> tuple[str, dict[int, float]]:
    """Digest of the model, and the loss of every step."""
    rows = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    digest = json.loads((run / "model/base-manifest.json").read_text())["base_digest"]
    return digest, {row["step"]: row["loss"] for row in rows if row["event"] == "update"}


def uninterrupted(runs: Path) -> Path:
    done = subprocess.run(fresh(runs), stdout=subprocess.PIPE, text=True, check=True)
    return Path(json.loads(done.stdout)["run"])


def killed(runs: Path, longest_s: float) -> tuple[Path, int]:
    """A training that is killed again and again, then left to its end."""
    rng, kills = random.Random(SEED), 0
    process = subprocess.Popen(fresh(runs), stdout=subprocess.DEVNULL)
    while not list(runs.glob("*/events.jsonl")):
        time.sleep(0.1)
    (run,) = runs.iterdir()
    while True:
        try:
            process.wait(rng.uniform(0, longest_s) if kills < KILLS else None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
        else:
            return run, kills
        process = subprocess.Popen(command(runs, "--resume", str(run)), stdout=subprocess.DEVNULL)


def main() -> None:
    """Run, write, print, exit."""
    started = time.time()
    with tempfile.TemporaryDirectory(prefix="tidemill-soak-") as folder:
        first = uninterrupted(Path(folder) / "first")
        wall_s = time.time() - started
        second = uninterrupted(Path(folder) / "second")
        third, kills = killed(Path(folder) / "third", wall_s / 4)
        found = [outcome(run) for run in (first, second, third)]
    result: dict[str, Any] = {
        "steps": STEPS, "kills": kills, "digest": found[0][0], "last_loss": found[0][1][STEPS],
        "two_runs_equal": found[0] == found[1], "killed_run_equal": found[0] == found[2],
    }
    met = result["two_runs_equal"] and result["killed_run_equal"] and kills >= 1
    path = write_soak("pretrain", STEPS, result | {"met": met}, started=started)
    conclude(f"pretrain: {STEPS} steps twice and with {kills} kills", path, met=met)
