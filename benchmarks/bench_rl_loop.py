"""The RL loop against its targets: `make bench ONLY=rl_loop`.

Wall time and accuracy come from the demonstration on its five preset seeds. They take half an hour, so the result of
`make soak ONLY=demo` is used when it was measured on this very commit; otherwise the seeds are run now.
"""

from __future__ import annotations

import json
import time
from typing import Any

import soak_demo
from harness import ROOT, Metric, Value, commit, write_result


def demonstration() -> dict[str, Any]:
    """The result of the five seeds on this commit."""
    path = ROOT / "benchmarks/soak/demo.json"
    if path.is_file():
        found = json.loads(path.read_text())
        if found["commit"] == commit() and found["n"] == len(soak_demo.SEEDS):
            print(f"demo: {path} was measured on this commit, {found['when']}")
            return found["result"]
    return soak_demo.run(list(soak_demo.SEEDS))[0]


def main() -> None:
    """Measure and write benchmarks/results/rl_loop.json."""
    started = time.time()
    found = demonstration()
    good = [row for row in found["seeds"] if not row.get("failed")]
    walls = [float(row["command_s"]) for row in good]
    shape = f"recipe {found['recipe']}, {len(good)} of {len(found['seeds'])} seeds, test n = 1024 before and after"
    metrics: list[Metric] = []
    if len(good) == len(found["seeds"]):
        mean, low, high = soak_demo.mean_interval(walls, top=float("inf"))
        metrics = [
            Metric(id="demo_wall_s", unit="s", shape=shape, value=Value(mean, low, high, len(walls)),
                   ours={"slowest": max(walls), "fastest": min(walls)}),
            Metric(id="acc_mean_lo95_5seeds", unit="share", shape=shape + "; the lower 95 % bound of the mean",
                   value=Value(*[found["after_lo95"]] * 3, len(good)),
                   ours={f"seed {row['seed']}": row["test_after"] for row in good}),
        ]
    write_result("rl_loop", metrics, peers={}, started=started)
