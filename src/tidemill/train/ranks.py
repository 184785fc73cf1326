"""One piece of work shared between processes of this machine: rank 0 here, the others started and ended here.

The others run a module as a program, which joins the group by `member`:

    python -m MODULE ARGUMENT... MEETING RANK SIZE
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tidemill.core.errors import TrainError
from tidemill.core.launcher import LocalLauncher
from tidemill.parallel import GlooGroup, Group, PeerLostError, SoloGroup

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """How the other ranks are started.

    what     of which the ranks are, for names and messages
    folder   for meeting and logs; emptied first
    ledger   of processes (tidemill.core.launcher)
    remedy   what to do when one is lost
    """

    size: int
    what: str
    module: str
    arguments: Sequence[str]
    folder: Path
    ledger: Path
    threads: int
    remedy: str

    def run(self, work: Callable[[Group], T]) -> T:
        """`work` as rank 0. TrainError if another rank is lost. No process is left either way."""
        if self.size == 1:
            return work(SoloGroup())
        launcher = LocalLauncher(self.ledger)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        meeting, logs = self.folder / "meeting", [self.folder / f"rank{rank}.log" for rank in range(self.size)]
        try:
            for rank in range(1, self.size):
                argv = [sys.executable, "-m", self.module, *self.arguments, str(meeting), str(rank), str(self.size)]
                launcher.start(f"{self.what} rank {rank}", argv, log=logs[rank],
                               env={"OMP_NUM_THREADS": str(self.threads)})
            with closing(GlooGroup(meeting, rank=0, size=self.size)) as group:
                return work(group)
        except PeerLostError as e:
            said = [line for log in logs if log.is_file() for line in log.read_text(errors="replace").splitlines()]
            raise TrainError(f"the {self.what} lost one of its {self.size} ranks: {said[-1] if said else e}",
                             remedy=self.remedy) from e
        finally:
            launcher.stop_all()


@contextmanager
def member(argv: Sequence[str]) -> Generator[tuple[list[str], Group]]:
    """In a started rank: the module's own arguments, and the group for the length of the block."""
    *arguments, meeting, rank, size = argv
    with closing(GlooGroup(Path(meeting), rank=int(rank), size=int(size))) as group:
        yield arguments, group
