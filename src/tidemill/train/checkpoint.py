"""Checkpoints of a run: adapter, optimizer, counters, canary, sync position. Whole or absent.

A checkpoint is one folder `stepNNNNN` with state.pt, state.json and manifest.json (digests of the two), written into a
hidden folder and renamed; a full disk or a kill leaves earlier ones valid. The newest valid one is what resume uses.
"""

from __future__ import annotations

import io
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tidemill.core.digests import digest_bytes, digest_file
from tidemill.core.errors import IntegrityError, TrainError
from tidemill.core.files import sync_dir, write_atomic, write_json

_NAME = re.compile(r"step(\d{5})")
KEEP = 2
"""Checkpoints kept; older ones are removed after a new one is safe."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`tensors` is what Trainer.state returned; `plain` is JSON data of the loop."""

    step: int
    tensors: dict[str, Any]
    plain: dict[str, Any]


def save(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write and verify one checkpoint, then remove all but the newest KEEP. TrainError on a write error (disk full);
    earlier checkpoints are untouched then and no part of the new one remains."""
    target = folder / f"step{checkpoint.step:05d}"
    part = folder / f".{target.name}.part"
    shutil.rmtree(part, ignore_errors=True)
    try:
        part.mkdir(parents=True)
        buffer = io.BytesIO()
        torch.save(checkpoint.tensors, buffer)
        write_atomic(part / "state.pt", buffer.getvalue())
        write_json(part / "state.json", {"step": checkpoint.step, **checkpoint.plain})
        write_json(part / "manifest.json", {name: digest_file(part / name) for name in ("state.pt", "state.json")})
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        sync_dir(folder)
    except OSError as e:
        shutil.rmtree(part, ignore_errors=True)
        raise TrainError(f"cannot write checkpoint {target}: {e.strerror}",
                         remedy="Free space, then resume the run: the checkpoints before this one are valid.") from e
    for old in _folders(folder)[:-KEEP]:
        shutil.rmtree(old)
    return target


def load_newest(folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose digests hold, or None if there is none. What a killed writer left is removed.
    IntegrityError if there are some but none is valid."""
    for part in folder.glob(".step*.part"):
        shutil.rmtree(part)
    found = _folders(folder)
    reasons: list[str] = []
    for path in reversed(found):
        try:
            return _load(path)
        except IntegrityError as e:
            reasons.append(str(e))
    if reasons:
        raise IntegrityError("no valid checkpoint: " + "; ".join(reasons))
    return None


def _load(path: Path) -> Checkpoint:
    try:
        manifest: dict[str, str] = json.loads((path / "manifest.json").read_text())
        data = {name: (path / name).read_bytes() for name in ("state.pt", "state.json")}
    except (OSError, ValueError) as e:
        raise IntegrityError(f"{path}: {e}") from e
    for name, raw in data.items():
        if digest_bytes(raw) != manifest.get(name):
            raise IntegrityError(f"{path / name} is not what its manifest says")
    plain: dict[str, Any] = json.loads(data["state.json"])
    step = int(plain.pop("step"))
    return Checkpoint(step, torch.load(io.BytesIO(data["state.pt"]), weights_only=True), plain)


def _folders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step*") if _NAME.fullmatch(p.name))
