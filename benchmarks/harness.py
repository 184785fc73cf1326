"""Measuring and recording: machine description, interleaved pairs, bootstrap intervals, verdicts against targets.

A result file is {"name", "commit", "machine", "when", "load", "peers", "metrics": [...]}; a metric has an id from
targets.yaml, a value {point, lo95, hi95, n}, and what it was made of. A required id without a metric counts as missed;
"met" needs the whole interval on the right side of the value, otherwise it is "unclear" or "missed".
"""

from __future__ import annotations

import json
import math
import os
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
MIN_PAIRS = 11


@dataclass
class Value:
    """A point estimate with its 95 % interval over n observations."""

    point: float
    lo95: float
    hi95: float
    n: int


@dataclass
class Metric:
    """One measured figure. `ours`, `peer` and `limit` say what the value was made of."""

    id: str
    unit: str
    shape: str
    value: Value
    ours: dict[str, float] = field(default_factory=dict)
    peer: dict[str, Any] = field(default_factory=dict)
    limit: dict[str, Any] = field(default_factory=dict)


def summary(samples: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile (the latter only from 20 samples on)."""
    ordered = sorted(samples)
    out = {"median": statistics.median(ordered), "n": len(ordered)}
    if len(ordered) >= 20:
        out["p95"] = ordered[math.ceil(0.95 * len(ordered)) - 1]
    return out


def bootstrap(samples: Sequence[float], statistic: Callable[[Sequence[float]], float] = statistics.median, *,
              rounds: int = 2000, seed: int = 0) -> Value:
    """Percentile bootstrap of a statistic."""
    rng = random.Random(seed)
    n = len(samples)
    draws = sorted(statistic([samples[rng.randrange(n)] for _ in range(n)]) for _ in range(rounds))
    return Value(statistic(samples), draws[int(0.025 * rounds)], draws[int(0.975 * rounds) - 1], n)


def interleaved(ours: Callable[[], float], peer: Callable[[], float], *,
                pairs: int = MIN_PAIRS) -> tuple[Value, dict, dict]:
    """Seconds of ours and peer in turn, ours/peer swapping places each pair; value = peer/ours (higher is better)."""
    if pairs < MIN_PAIRS:
        raise ValueError(f"pairs = {pairs}: at least {MIN_PAIRS} are needed")
    ours(), peer()
    a: list[float] = []
    b: list[float] = []
    for i in range(pairs):
        for which in ((0, 1) if i % 2 == 0 else (1, 0)):
            (a if which == 0 else b).append((ours, peer)[which]())
    ratios = [y / x for x, y in zip(a, b, strict=True)]
    return bootstrap(ratios), summary(a), summary(b)


def machine() -> dict[str, Any]:
    """What this was measured on."""
    info = Path("/proc/cpuinfo").read_text()
    pick = {k: next((line.split(":", 1)[1].strip() for line in info.splitlines() if line.startswith(k)), "?")
            for k in ("model name", "cpu family", "model")}
    flags = next((line for line in info.splitlines() if line.startswith("flags")), "")
    isa = next((n for n in ("avx512f", "avx2", "avx") if f" {n}" in flags), "baseline")
    memory_gib = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    return {"cpu": pick["model name"], "family": f"{pick['cpu family']}/{pick['model']}", "isa": isa,
            "cores": os.cpu_count(), "memory_gib": memory_gib, "kernel": platform.release(),
            "python": platform.python_version()}


def commit() -> str:
    """Short commit, with `+dirty` if the working tree differs."""
    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *args], capture_output=True, text=True, check=True)
        return done.stdout.strip()
    return git("rev-parse", "--short", "HEAD") + ("+dirty" if git("status", "--porcelain", "-uno") else "")


def verdict(metric: Metric, target: dict[str, Any]) -> str:
    """`goal`, `met`, `unclear` or `missed` against targets.yaml."""
    lower = bool(target.get("lower_is_better"))
    def clears(bound: float) -> bool:
        return metric.value.hi95 <= bound if lower else metric.value.lo95 >= bound
    def touches(bound: float) -> bool:
        return metric.value.lo95 <= bound if lower else metric.value.hi95 >= bound
    if "goal" in target and clears(target["goal"]):
        return "goal"
    must = target.get("must", target.get("goal"))
    return "met" if clears(must) else "unclear" if touches(must) else "missed"


def targets(suite: str) -> dict[str, dict[str, Any]]:
    """Required ids of one suite."""
    return yaml.safe_load((ROOT / "benchmarks/targets.yaml").read_text()).get(suite, {})


def write_result(suite: str, metrics: Sequence[Metric], *, peers: dict[str, str], started: float) -> Path:
    """Write benchmarks/results/SUITE.json and print one line per required id."""
    wanted = targets(suite)
    rows: list[dict[str, Any]] = [
        {"id": m.id, "unit": m.unit, "shape": m.shape, "value": vars(m.value), "ours": m.ours, "peer": m.peer,
         "limit": m.limit, "verdict": verdict(m, wanted[m.id]) if m.id in wanted else "no target"} for m in metrics
    ]
    have = {m.id for m in metrics}
    rows += [{"id": i, "verdict": "missed", "why": "not measured"} for i in wanted if i not in have]
    path = ROOT / f"benchmarks/results/{suite}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({
        "name": suite, "commit": commit(), "machine": machine(),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "wall_s": round(time.time() - started, 1), "load": os.getloadavg(), "peers": peers, "metrics": rows,
    }, indent=1) + "\n")
    for row in rows:
        value = row.get("value")
        figure = f"{value['point']:.3g} [{value['lo95']:.3g}, {value['hi95']:.3g}] n={value['n']}" if value else "-"
        print(f"{suite}.{row['id']}: {figure} {row.get('unit', '')} -> {row['verdict']}")
    return path


def conclude(text: str, path: Path, *, met: bool) -> None:
    """Last line of a soak run: what was found, the verdict, where it lies. Exit code 1 if it is not met."""
    print(f"{text} -> {'met' if met else 'MISSED'}; {path}")
    if not met:
        sys.exit(1)


def write_soak(name: str, n: int, result: dict[str, Any], *, started: float) -> Path:
    """Write benchmarks/soak/NAME.json, dated, with n."""
    path = ROOT / f"benchmarks/soak/{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({
        "name": name, "n": n, "when": datetime.now(UTC).isoformat(timespec="seconds"), "commit": commit(),
        "machine": machine(), "wall_s": round(time.time() - started, 1), "result": result,
    }, indent=1) + "\n")
    return path
