"""Warm-up by itself: stopped or killed it goes on where it was, bit for bit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from loop_world import values
from torch import Tensor

from tidemill.agent.task import Split
from tidemill.core.errors import TrainError
from tidemill.core.files import read_jsonl
from tidemill.core.launcher import leftovers
from tidemill.model.balance import RouterBalance
from tidemill.model.causal_lm import CausalLM
from tidemill.parallel import GlooGroup, Group, SoloGroup
from tidemill.train import warmup
from tidemill.train.config import load_recipe
from tidemill.train.parts import Plan
from tidemill.train.run import start
from tidemill.train.run_dir import RunDir
from tidemill.train.samples import Sample
from tidemill.train.warmup import WarmupReport, WarmupStopped, warm_up
from tidemill.train.warmup_ranks import warmed_up

CONFIG = load_recipe("toolcalc", values(warmup__max_steps=9, warmup__check_every=4), seed=5)


def attempt(folder: Path | None, *, stop_after: int = 99) -> tuple[CausalLM, WarmupReport | None, list[int]]:
    """One process's worth of warm-up: a fresh model, asked to stop after a step."""
    plan = Plan.of(CONFIG)
    model = CausalLM(plan.model, seed=CONFIG.seed)
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


def same(a: CausalLM, b: CausalLM) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True))


def test_stopped_twice_it_ends_as_if_it_never_was(tmp_path: Path) -> None:
    model, report, _ = attempt(None)
    assert attempt(tmp_path, stop_after=2)[1:] == (None, [1, 2, 3])
    assert attempt(tmp_path, stop_after=1)[1:] == (None, [4, 5])
    resumed, again, steps = attempt(tmp_path)
    assert steps == [6, 7, 8, 9]
    assert again == report
    assert same(model, resumed)


def test_killed_it_goes_on_from_the_last_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "CHECKPOINT_S", 0.0)
    attempt(tmp_path, stop_after=4)
    (tmp_path / ".step00006.part").mkdir()
    assert attempt(tmp_path)[2] == [6, 7, 8, 9]


def shared(folder: Path, *, ranks: int, stop_after: int = 99, tell: Callable[[int], None] = lambda step: None,
           resume: RunDir | None = None) -> tuple[CausalLM | None, list[int], RunDir]:
    """A run's warm-up by `ranks` processes."""
    config = load_recipe("toolcalc", values(warmup__max_steps=9, warmup__check_every=4, warmup__ranks=ranks), seed=5)
    run = resume or start(config, folder)
    steps: list[int] = []

    def progress(step: int, loss: float, accuracy: float) -> None:
        steps.append(step)
        tell(step)

    try:
        model, _ = warmed_up(config, Plan.of(config), run, progress=progress, stop=lambda: len(steps) >= stop_after)
    except WarmupStopped:
        model = None
    assert not leftovers(run.ledger)
    return model, steps, run


def test_gradients_losses_and_biases_do_not_depend_on_the_number_of_ranks(tmp_path: Path) -> None:
    plan = Plan.of(CONFIG)
    samples = [Sample.from_log(log, 0.0) for log in plan.warmup_sources(CONFIG.seed)[0](1, 7)]

    def step(group: Group) -> tuple[float, dict[str, Tensor]]:
        model = CausalLM(plan.model, seed=1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        loss, _ = warmup._step(model, optimizer, RouterBalance(model), samples, group, stopping=False)
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        biases = {name: b for name, b in model.state_dict().items() if name.endswith("e_score_correction_bias")}
        assert biases
        return loss, found | biases

    def rank(number: int) -> tuple[float, dict[str, Tensor]]:
        group = GlooGroup(tmp_path / "meeting", rank=number, size=2, meet_s=20, wait_s=20)
        try:
            return step(group)
        finally:
            group.close()

    loss, alone = step(SoloGroup())
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(rank, range(2))
    assert first[0] == second[0] == pytest.approx(loss, rel=1e-6)
    for name, want in alone.items():
        torch.testing.assert_close(first[1][name], want, rtol=1e-4, atol=1e-6, msg=name)
        assert torch.equal(first[1][name], second[1][name])


def test_two_ranks_give_the_same_bits_every_time_also_when_stopped_between(tmp_path: Path) -> None:
    two, _, run = shared(tmp_path, ranks=2)
    assert [row["name"] for row in read_jsonl(run.ledger)] == ["warm-up rank 1"]
    assert two is not None
    stopped, steps, run = shared(tmp_path, ranks=2, stop_after=4)
    assert (stopped, steps) == (None, [1, 2, 3, 4, 5])
    again, steps, _ = shared(tmp_path, ranks=2, resume=run)
    assert steps == [6, 7, 8, 9]
    assert again is not None
    assert same(two, again)


def test_a_lost_rank_ends_the_warm_up_with_its_name(tmp_path: Path) -> None:
    def kill(step: int) -> None:
        (run,) = tmp_path.iterdir()
        if step == 2:
            for _, pid in leftovers(run / "processes.jsonl"):
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(TrainError, match="lost one of its 2 ranks"):
        shared(tmp_path, ranks=2, tell=kill)
    (run,) = tmp_path.iterdir()
    assert not leftovers(run / "processes.jsonl")
