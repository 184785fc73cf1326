"""The demonstration on five preset seeds: `make soak ONLY=demo`, with `SEEDS=1,2` fewer.

Each seed is one `tidemill rl run toolcalc` in a process of its own, against real sandboxes. Writes
benchmarks/soak/demo.json: test accuracy before and after with intervals for every seed, the mean with its Student 95 %
interval over seeds, wall time, sandboxes left over. Exit code 1 if a seed starts above 45 %, leaves a sandbox, or the
lower bound of the mean is below 0.80.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import conclude, write_soak

SEEDS = (1, 2, 3, 4, 5)
RECIPE = "toolcalc"
MUST_LO95, MUST_BEFORE = 0.80, 0.45
_T95 = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}
"""Student's 97.5 % quantile by degrees of freedom."""


def one(seed: int, runs: Path, *extra: str) -> dict[str, Any]:
    """Summary of one seed's run, and the seconds of the whole command."""
    started = time.monotonic()
    argv = [sys.executable, "-m", "tidemill.cli.main", "rl", "run", RECIPE, "--seed", str(seed), "--json",
            "--runs-dir", str(runs), *extra]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        return {"seed": seed, "failed": True, "exit_code": done.returncode}
    summary: dict[str, Any] = json.loads(done.stdout)["summary"]
    return summary | {"command_s": round(time.monotonic() - started, 1)}


def mean_interval(values: list[float], *, top: float = 1.0) -> tuple[float, float, float]:
    """Mean and Student 95 % interval over seeds, within [0, top]."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return mean, 0.0, top
    half = _T95[len(values) - 1] * statistics.stdev(values) / len(values) ** 0.5
    return mean, max(0.0, mean - half), min(top, mean + half)


def run(seeds: list[int]) -> tuple[dict[str, Any], Path]:
    """The seeds one after the other; writes benchmarks/soak/demo.json and returns its result and path."""
    started = time.time()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="tidemill-soak-") as folder:
        for seed in seeds:
            rows.append(one(seed, Path(folder)))
            print(f"seed {seed}: {json.dumps(rows[-1])}", file=sys.stderr, flush=True)
    good = [row for row in rows if not row.get("failed")]
    after = [row["test_after"] for row in good]
    mean, low, high = mean_interval(after) if after else (0.0, 0.0, 0.0)
    met = (len(good) == len(rows) and low >= MUST_LO95 and all(r["test_before"] <= MUST_BEFORE for r in good)
           and all(r["sandboxes_left"] == 0 for r in good))
    result = {"recipe": RECIPE, "after_mean": mean, "after_lo95": low, "after_hi95": high, "met": met,
              "before_mean": statistics.fmean(r["test_before"] for r in good) if good else None,
              "wall_s_max": max((r["command_s"] for r in good), default=None), "seeds": rows}
    return result, write_soak("demo", len(rows), result, started=started)


def main() -> None:
    """Run, write, print, exit."""
    result, path = run([int(s) for s in os.environ.get("SEEDS", "").split(",") if s] or list(SEEDS))
    good = sum(1 for row in result["seeds"] if not row.get("failed"))
    conclude(f"demo: after RL {result['after_mean']:.1%} [{result['after_lo95']:.1%}, {result['after_hi95']:.1%}] over "
             f"{good} of {len(result['seeds'])} seeds", path, met=result["met"])
