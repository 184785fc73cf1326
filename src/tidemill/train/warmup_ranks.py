"""The warm-up of a run, shared between processes.

Rank 0 lives in the run's own process; the others are started here and run this module as a program:

    python -m tidemill.train.warmup_ranks RUN_DIR MEETING RANK SIZE
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import torch

from tidemill.agent.task import Split
from tidemill.core.config import load_yaml, parse_config
from tidemill.core.errors import TrainError
from tidemill.core.launcher import LocalLauncher
from tidemill.model.causal_lm import CausalLM
from tidemill.parallel import GlooGroup, Group, PeerLostError, SoloGroup
from tidemill.train.config import RunConfig
from tidemill.train.parts import Plan
from tidemill.train.rollouts import EVAL_SEED
from tidemill.train.run_dir import RunDir
from tidemill.train.warmup import WarmupReport, WarmupStopped, warm_up

Tell = Callable[[int, float, float], None]


def warmed_up(config: RunConfig, plan: Plan, run: RunDir, *, progress: Tell,
              stop: Callable[[], bool]) -> tuple[CausalLM, WarmupReport]:
    """A fresh model and its warm-up, by `config.warmup.ranks` processes. Raises TrainError if one of them is lost,
    WarmupStopped if `stop` says so. No process is left either way."""
    size = config.warmup.ranks
    if size == 1:
        return _rank(config, plan, run, SoloGroup(), progress=progress, stop=stop)
    launcher = LocalLauncher(run.ledger)
    folder = run.warmup / "ranks"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    meeting, logs = folder / "meeting", [folder / f"rank{rank}.log" for rank in range(size)]
    environment = {"OMP_NUM_THREADS": str(config.threads)}
    try:
        for rank in range(1, size):
            argv = [sys.executable, "-m", __name__, str(run.path), str(meeting), str(rank), str(size)]
            launcher.start(f"warm-up rank {rank}", argv, log=logs[rank], env=environment)
        with closing(GlooGroup(meeting, rank=0, size=size)) as group:
            return _rank(config, plan, run, group, progress=progress, stop=stop)
    except PeerLostError as e:
        said = [line for log in logs if log.is_file() for line in log.read_text(errors="replace").splitlines()]
        raise TrainError(f"the warm-up lost one of its {size} ranks: {said[-1] if said else e}",
                         remedy="Resume the run: it goes on from the last checkpoint. With warmup.ranks = 1 a new run "
                                "needs no other process.") from e
    finally:
        launcher.stop_all()


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
    path, meeting, rank, size = argv
    run = RunDir(Path(path))
    config = parse_config(RunConfig, load_yaml(run.path / "config.resolved.yaml"), source=path)
    plan = Plan.of(config)
    with closing(GlooGroup(Path(meeting), rank=int(rank), size=int(size))) as group, suppress(WarmupStopped):
        _rank(config, plan, run, group, progress=lambda step, loss, accuracy: None, stop=lambda: False)


if __name__ == "__main__":
    main(sys.argv[1:])
