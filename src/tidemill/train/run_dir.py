"""A run's folder: what lies where, and the exactly-once ledger of prompts.

    runs/ID/  config.resolved.yaml  env.json  data.json  events.jsonl  canary.jsonl  processes.jsonl
              base/  adapters/vNNNN/  episodes/*.jsonl.zst  checkpoints/  controls/  tensorboard/
              report.html  summary.json

Rows of events.jsonl carry `attempt` (0, then one more at each resume). A resume from step s discards, for the lineage
of the final weights, every earlier row of a step beyond s; `lineage` gives the rows that count.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import yaml
import zstandard

from tidemill import __version__
from tidemill.core.config import to_plain
from tidemill.core.errors import InputError, IntegrityError
from tidemill.core.files import append_jsonl, read_jsonl, write_atomic, write_json
from tidemill.core.ids import new_id

SUMMARY_KEYS = (
    "recipe", "seed", "test_n", "test_before", "test_after", "ci95_before", "ci95_after", "dev_n", "stopped_by",
    "steps", "wall_s", "setup_s", "sandboxes_used", "sandboxes_left", "tool_calls", "infra_errors", "kl_floor",
    "kl_last", "syncs", "syncs_verified", "head_digest",
)
"""Keys of summary.json, all of them, always."""


RL_FOLDERS = ("adapters", "episodes", "checkpoints", "controls", "tensorboard")


class Named(Protocol):
    """A configuration dataclass that names its run."""

    @property
    def name(self) -> str: ...


class RunDir:
    """Paths and writers of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.attempt = 0

    @classmethod
    def create(cls, runs: Path, config: Named, folders: Sequence[str] = RL_FOLDERS) -> RunDir:
        """A new folder whose name sorts by time. InputError if `runs` cannot be written."""
        path = runs / new_id(config.name)
        try:
            for sub in folders:
                (path / sub).mkdir(parents=True)
        except OSError as e:
            raise InputError(f"cannot create a run folder under {runs}: {e.strerror}", field="runs-dir") from e
        run = cls(path)
        write_atomic(path / "config.resolved.yaml", yaml.safe_dump(to_plain(config), sort_keys=False).encode())
        write_json(path / "env.json", environment())
        return run

    @classmethod
    def open(cls, path: Path) -> RunDir:
        """An existing folder. InputError if it is none."""
        if not (path / "config.resolved.yaml").is_file():
            raise InputError(f"{path} is not a run folder (no config.resolved.yaml)", field="resume")
        run = cls(path)
        run.attempt = 1 + max((int(row["attempt"]) for row in read_jsonl(run.events)), default=-1)
        return run

    @property
    def name(self) -> str:
        """The run's id; also the name of its sandbox lease."""
        return self.path.name

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def base(self) -> Path:
        return self.path / "base"

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def warmup(self) -> Path:
        """Checkpoints of an unfinished warm-up."""
        return self.path / "warmup"

    @property
    def ledger(self) -> Path:
        """Processes this run started (tidemill.core.launcher)."""
        return self.path / "processes.jsonl"

    def event(self, kind: str, **fields: Any) -> None:
        """Append one row to events.jsonl."""
        append_jsonl(self.events, {"event": kind, "attempt": self.attempt, **fields})

    def canary(self, row: Mapping[str, Any]) -> None:
        append_jsonl(self.path / "canary.jsonl", {"attempt": self.attempt, **row})

    def write_episodes(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """episodes/NAME.jsonl.zst, whole or not at all; an earlier attempt's file is replaced."""
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        write_atomic(self.path / "episodes" / f"{name}.jsonl.zst", zstandard.compress(text.encode(), 3))

    def read_episodes(self, name: str) -> Iterator[dict[str, Any]]:
        """Rows of one episode file."""
        data = zstandard.decompress((self.path / "episodes" / f"{name}.jsonl.zst").read_bytes())
        for line in data.decode().splitlines():
            yield json.loads(line)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """summary.json with exactly SUMMARY_KEYS."""
        if set(summary) != set(SUMMARY_KEYS):
            raise InputError(f"summary keys differ: {sorted(set(summary) ^ set(SUMMARY_KEYS))}", field="summary")
        write_json(self.path / "summary.json", {key: summary[key] for key in SUMMARY_KEYS})


def lineage(run: RunDir) -> list[dict[str, Any]]:
    """`step` events that led to the final weights, in order: later attempts replace what they did again."""
    steps: dict[int, dict[str, Any]] = {}
    for row in read_jsonl(run.events):
        if row["event"] == "resume":
            steps = {s: r for s, r in steps.items() if s <= row["from_step"]}
        elif row["event"] == "step":
            steps[int(row["step"])] = row
    return [steps[s] for s in sorted(steps)]


def check_exactly_once(run: RunDir) -> int:
    """Every prompt of the training stream counts exactly once in the lineage, without gaps; returns how many. Raises
    IntegrityError naming the step."""
    expected, cursor = 1, 0
    for row in lineage(run):
        first, last = row["prompts"]
        if row["step"] != expected or first != cursor or last < first:
            raise IntegrityError(f"{run.name}: step {row['step']} used prompts {first}..{last}, expected step "
                                 f"{expected} to start at prompt {cursor}")
        expected, cursor = expected + 1, last
    return cursor


def environment() -> dict[str, Any]:
    """Where a run happened."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    cpu = next((x.split(":", 1)[1].strip() for x in lines if x.startswith("model name")), platform.processor())
    return {
        "tidemill": __version__, "torch": torch.__version__, "python": platform.python_version(),
        "system": platform.platform(), "cpu": cpu, "cores": os.cpu_count(),
    }
