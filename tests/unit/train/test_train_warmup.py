"""Warm-up by itself: stopped or killed it goes on where it was, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from loop_world import values

from tidemill.agent.task import Split
from tidemill.model.causal_lm import K3ForCausalLM
from tidemill.train import warmup
from tidemill.train.config import load_recipe
from tidemill.train.parts import Plan
from tidemill.train.warmup import WarmupReport, WarmupStopped, warm_up

CONFIG = load_recipe("toolcalc", values(warmup__max_steps=9, warmup__check_every=4), seed=5)


def attempt(folder: Path | None, *, stop_after: int = 99) -> tuple[K3ForCausalLM, WarmupReport | None, list[int]]:
    """One process's worth of warm-up: a fresh model, asked to stop after a step."""
    plan = Plan.of(CONFIG)
    model = K3ForCausalLM(plan.model, seed=CONFIG.seed)
    episodes, _ = plan.warmup_sources(CONFIG.seed)
    steps: list[int] = []
    try:
        report = warm_up(model, CONFIG.warmup, episodes=episodes, drills=None,
                         dev=plan.demonstrations(Split.DEV, 0, 4, 1), checkpoints=folder,
                         progress=lambda step, loss, accuracy: steps.append(step),
                         stop=lambda: len(steps) >= stop_after)
    except WarmupStopped:
        report = None
    return model, report, steps


def same(a: K3ForCausalLM, b: K3ForCausalLM) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_stopped_twice_it_ends_as_if_it_never_was(tmp_path: Path) -> None:
    model, report, _ = attempt(None)
    assert attempt(tmp_path, stop_after=3)[1:] == (None, [1, 2, 3])
    assert attempt(tmp_path, stop_after=2)[1:] == (None, [4, 5])
    resumed, again, steps = attempt(tmp_path)
    assert steps == [6, 7, 8, 9]
    assert again == report
    assert same(model, resumed)


def test_killed_it_goes_on_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "CHECKPOINT_S", 0.0)
    attempt(tmp_path, stop_after=5)
    (tmp_path / ".step00006.part").mkdir()
    assert attempt(tmp_path)[2] == [6, 7, 8, 9]
