"""A finished or running run as its folder tells it: what the report reads. Nothing is computed anew."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidemill.core.config import load_yaml
from tidemill.core.files import read_jsonl
from tidemill.train.run_dir import RunDir, lineage

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RunRecord:
    """Rows by kind. Where a resumed run did a step again, only the later doing is kept."""

    run: RunDir
    config: dict[str, Any]
    environment: dict[str, Any]
    data: dict[str, Any]
    summary: dict[str, Any] | None
    """None while the run has not ended."""
    steps: Rows
    evals: Rows
    syncs: Rows
    warmup: Rows
    canary: Rows
    controls: Rows
    other: dict[str, Rows]
    """Events of all other kinds, in order."""

    @classmethod
    def load(cls, run: RunDir) -> RunRecord:
        """Read the folder. Files that do not exist yet count as empty."""
        kinds: dict[str, Rows] = {}
        for row in read_jsonl(run.events):
            if row["event"] == "resume":
                _forget(kinds, int(row["from_step"]))
            kinds.setdefault(row["event"], []).append(row)
        canary = {int(row["version"]): row for row in read_jsonl(run.path / "canary.jsonl")}
        known = {"step", "eval", "sync", "warmup"}
        return cls(
            run=run, config=load_yaml(run.path / "config.resolved.yaml"),
            environment=_json(run.path / "env.json") or {}, data=_json(run.path / "data.json") or {},
            summary=_json(run.path / "summary.json"), steps=lineage(run),
            evals=kinds.get("eval", []), syncs=_latest(kinds.get("sync", []), "version"),
            warmup=_latest(kinds.get("warmup", []), "step"), canary=[canary[v] for v in sorted(canary)],
            controls=[_json(p) or {} for p in sorted((run.path / "controls").glob("*.json"))],
            other={k: v for k, v in kinds.items() if k not in known},
        )

    def last(self, kind: str) -> dict[str, Any]:
        """The last event of a kind; empty if there was none."""
        rows = self.other.get(kind)
        return rows[-1] if rows else {}

    def evals_of(self, split: str) -> Rows:
        """Evaluations of one split by step."""
        return [row for row in self.evals if row["split"] == split]


def _forget(kinds: dict[str, Rows], step: int) -> None:
    """A resume from `step`: later evaluations belong to work that is done again (steps are lineage's business)."""
    kinds["eval"] = [row for row in kinds.get("eval", []) if row["step"] <= step]


def _latest(rows: Rows, key: str) -> Rows:
    by_key = {int(row[key]): row for row in rows}
    return [by_key[k] for k in sorted(by_key)]


def _json(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
