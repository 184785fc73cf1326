"""The warm-up of a run, shared between processes. Rank 0 lives in the run's own process; the others run this module:

    python -m tidemill.train.warmup_ranks RUN_DIR MEETING RANK SIZE
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from tidemill.agent.task import Split
from tidemill.core.config import load_yaml, parse_config
from tidemill.model.causal_lm import CausalLM
from tidemill.parallel import Group
from tidemill.train.config import RunConfig
from tidemill.train.parts import Plan
from tidemill.train.ranks import Ranks, member
from tidemill.train.rollouts import EVAL_SEED
from tidemill.train.run_dir import RunDir
from tidemill.train.warmup import WarmupReport, WarmupStopped, warm_up

Tell = Callable[[int, float, float], None]


def warmed_up(config: RunConfig, plan: Plan, run: RunDir, *, progress: Tell,
              stop: Callable[[], bool]) -> tuple[CausalLM, WarmupReport]:
    """A fresh model and its warm-up, by `config.warmup.ranks` processes. Raises TrainError if one of them is lost,
    WarmupStopped if `stop` says so. No process is left either way."""
    ranks = Ranks(size=config.warmup.ranks, what="warm-up", module=__name__, arguments=[str(run.path)],
                  folder=run.warmup / "ranks", ledger=run.ledger, threads=config.threads,
                  remedy="Resume the run: it goes on from the last checkpoint. With warmup.ranks = 1 a new run "
                         "needs no other process.")
    return ranks.run(lambda group: _rank(config, plan, run, group, progress=progress, stop=stop))


def _rank(config: RunConfig, plan: Plan, run: RunDir, group: Group, *, progress: Tell,
          stop: Callable[[], bool]) -> tuple[CausalLM, WarmupReport]:
    """One rank's part; the same arguments everywhere make the same model everywhere."""
    torch.set_num_threads(config.threads)
    model = CausalLM(plan.model, seed=config.seed)
    episodes, drills = plan.warmup_sources(config.seed)
    dev = plan.demonstrations(Split.DEV, 0, config.warmup.check_n, EVAL_SEED)
    report = warm_up(model, config.warmup, episodes=episodes, drills=drills, dev=dev, progress=progress,
                     dev_drills=drills(0, config.warmup.check_n), checkpoints=run.warmup, stop=stop, group=group)
    return model, report


def main(argv: list[str]) -> None:
    """A rank beside the run's own process."""
    with member(argv) as ((path,), group), suppress(WarmupStopped):
        run = RunDir(Path(path))
        config = parse_config(RunConfig, load_yaml(run.path / "config.resolved.yaml"), source=path)
        _rank(config, Plan.of(config), run, group, progress=lambda step, loss, accuracy: None, stop=lambda: False)


if __name__ == "__main__":
    main(sys.argv[1:])
