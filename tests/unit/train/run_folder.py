"""A small, complete run folder for tests of what reads one. Not a test file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tidemill.core.files import write_json
from tidemill.train.config import ControlSection, RunConfig, TaskSection
from tidemill.train.metrics import Metrics
from tidemill.train.run_dir import RunDir

CONFIG = RunConfig(name="demo", about="a <b>bold</b> claim & more", task=TaskSection(name="ledger"),
                   controls={"bit-flip": ControlSection(steps=3, expect="sync-refused")})

SUMMARY: dict[str, Any] = {
    "recipe": "demo", "seed": 1, "test_n": 1024, "test_before": 0.25, "test_after": 0.9453125,
    "ci95_before": [0.22, 0.28], "ci95_after": [0.93, 0.96],
    "dev_n": 256, "stopped_by": "dev", "steps": 3, "wall_s": 200.5, "setup_s": 21.0,
    "sandboxes_used": 32, "sandboxes_left": 0, "tool_calls": 700, "infra_errors": 1, "kl_floor": 1e-9, "kl_last": 2e-9,
    "syncs": 4, "syncs_verified": 4, "head_digest": "sha256:abc",
}


def step_row(step: int, first: int, last: int) -> dict[str, Any]:
    """A `step` event."""
    return {
        "step": step, "version": step, "prompts": [first, last], "rounds": 1, "groups": 3,
        "drops": {"all_equal": 5, "too_small": 0}, "episodes": 64,
        "outcomes": {"ok": 40, "wrong": 23, "infra_error": 1},
        "reward": 0.1 * step, "accuracy": 0.1 * step, "outcome": "normal", "loss": 0.01, "grad_norm": 0.5,
        "entropy": 0.4,
        "clip_share": 0.0, "kl_k1": 1e-6, "kl_k3": 1e-9, "sampled_tokens": 900, "total_tokens": 7000, "tool_calls": 64,
        "tool_ms": 3.25, "seconds": {"generate": 2.0, "train": 1.5},
    }


def episode(outcome: str, **more: Any) -> dict[str, Any]:
    """An episode row of three tokens, the last two sampled."""
    return {"outcome": outcome, "reward": 1.0, "ids": [1, 2, 3], "sampled": [0, 1, 1], "logprobs": [0.0, -0.5, -3.0],
            "versions": [-1, 2, 2], **more}


def write_run(runs: Path, *, finished: bool = True) -> RunDir:
    """A run of three steps that was killed after the second and resumed from the first."""
    run = RunDir.create(runs, CONFIG)
    with Metrics(run) as metrics:
        metrics.event("start", recipe="demo", seed=1, max_steps=3)
        for step in range(1, 4):
            metrics.event("warmup", step=step, loss=3.0 / step, accuracy=0.1 * step)
        metrics.event("warmup_end", steps=3, loss=1.0, accuracy=0.3, stopped_early=True, tokens=4096, seconds=2.5)
        metrics.event("eval", step=0, split="dev", n=256, correct=64, accuracy=0.25, lo95=0.2, hi95=0.31,
                      outcomes={"ok": 64, "wrong": 192})
        metrics.event("floor", floor=1e-7, repeatability=0.0, threshold=1e-3)
        metrics.event("step", **step_row(1, 0, 8))
        metrics.event("eval", step=2, split="dev", n=256, correct=99, accuracy=0.99, lo95=0.9, hi95=1.0, outcomes={})
        metrics.event("step", **(step_row(2, 8, 16) | {"entropy": 123.0}))
    run = RunDir.open(run.path)
    with Metrics(run) as metrics:
        metrics.event("resume", from_step=1, removed=["engine (pid 7)"])
        for version in (1, 2, 3):
            metrics.event("sync", version=version, manifest_sha256=f"sha256:{version:03d}", tensors=10, changed=5,
                          nbytes=4000, chunks=2, largest_chunk=2048, attempts=1, seconds=0.004)
            metrics.canary({"step": version, "version": version, "mean_diff": 1e-7, "max_diff": 1e-6, "k3": 1e-9,
                            "trainer_moved": 0.01 * version, "engine_moved": 0.01 * version, "missed": 1e-8,
                            "threshold": 1e-3, "fires": "level" if version == 3 else ""})
        metrics.event("step", **step_row(2, 8, 16))
        metrics.event("step", **step_row(3, 16, 24))
        metrics.event("stop", stopped_by="dev", step=3)
    wrong = episode("wrong", advantage=-0.5, problem_id="p<1>")
    run.write_episodes("step-00001", [wrong, episode("ok"), episode("ok")])
    run.write_episodes("test-00000", [episode("infra_error", error="sandbox died & went")])
    write_json(run.path / "controls/bit-flip.json", {
        "name": "bit-flip", "expect": "sync-refused", "behaved": False, "why": "it <did> not", "outcome": {}})
    if finished:
        run.write_summary(SUMMARY)
    return run
