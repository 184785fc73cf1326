"""What a run tells the world: events.jsonl and canary.jsonl as the truth, TensorBoard scalars, listeners (live view).

Kinds of events and the fields the report and the live view read (others may stand beside them):

    start       recipe, seed, max_steps, version of tidemill; once per attempt
    resume      from_step, removed (what an earlier attempt had left behind, as text)
    setup       what, seconds                      pool started, base packed, ...
    warmup      step, loss, accuracy
    warmup_end  steps, loss, accuracy, stopped_early, tokens, seconds
    state       old, new                           moves of the state machine
    eval        step, split, n, correct, accuracy, lo95, hi95, outcomes, seconds
    step        step, version, prompts [first, last), rounds, groups, drops {reason: n}, episodes,
                outcomes {outcome: n}, reward (mean over all episodes of the step), accuracy (share graded correct),
                outcome (of the update), loss, grad_norm, entropy, clip_share, kl_k1, kl_k3, sampled_tokens,
                total_tokens, tool_calls, tool_ms (mean), seconds {generate, train, ...}
    sync        version, manifest_sha256, tensors, changed, nbytes, chunks, largest_chunk, attempts, seconds
    floor       floor, repeatability, threshold     of the canary, in nats per token
    checkpoint  step, nbytes, seconds
    update      step, tokens, loss, grad_norm, lr, tokens_per_s          of a pretraining or fine-tuning
    held_out    step, source, loss (nats per learned token), bits_per_byte (of text), documents, seconds
    control     name, expect, verdict
    stop        stopped_by, step
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.summary.writer.record_writer import RecordWriter

from tidemill.core.files import WholeWriter
from tidemill.train.run_dir import RunDir

Row = Mapping[str, Any]

SCALARS: dict[str, dict[str, str]] = {
    "warmup": {"loss": "warmup/loss", "accuracy": "warmup/accuracy"},
    "update": {"loss": "train/loss", "grad_norm": "train/grad_norm", "lr": "train/lr",
               "tokens_per_s": "train/tokens_per_s"},
    "held_out": {"loss": "held_out/{source}/loss", "bits_per_byte": "held_out/{source}/bits_per_byte"},
    "eval": {"accuracy": "accuracy/{split}"},
    "step": {
        "reward": "reward/mean", "accuracy": "reward/share_correct", "rounds": "reward/rounds",
        "groups": "reward/groups",
        "loss": "policy/loss", "grad_norm": "policy/grad_norm", "entropy": "policy/entropy",
        "clip_share": "policy/clip_share", "kl_k1": "mismatch/k1", "kl_k3": "mismatch/k3",
        "tool_calls": "sandbox/tool_calls", "tool_ms": "sandbox/tool_ms",
    },
    "sync": {"seconds": "time/sync", "attempts": "sync/attempts", "changed": "sync/changed_tensors"},
    "canary": {"mean_diff": "canary/mean_diff", "trainer_moved": "canary/trainer_moved",
               "engine_moved": "canary/engine_moved", "missed": "canary/missed", "threshold": "canary/threshold"},
}
"""TensorBoard tag of each field by event kind; `seconds` of a step become time/NAME."""


class Listener(Protocol):
    """Follows a run while it happens. Must not raise and must return quickly."""

    def on_event(self, kind: str, row: Row) -> None: ...

    def on_progress(self, phase: str, done: int, total: int) -> None: ...


class Metrics:
    """Writers of one attempt of a run. Use as a context manager; `close` is idempotent."""

    def __init__(self, run: RunDir, *, listeners: Sequence[Listener] = ()) -> None:
        self._run, self._listeners = run, tuple(listeners)
        self._started = time.monotonic()
        self._board: Board | None = Board(run.path / "tensorboard")

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def event(self, kind: str, **fields: Any) -> None:
        """Append a row to events.jsonl (with `t`, seconds since this attempt began) and pass it on."""
        row = {"t": round(time.monotonic() - self._started, 3), **fields}
        self._run.event(kind, **row)
        self._pass_on(kind, row)

    def canary(self, row: Row) -> None:
        """Append a reading (CanaryReading.to_json and its step) to canary.jsonl and pass it on."""
        self._run.canary(row)
        self._pass_on("canary", row)

    def progress(self, phase: str, done: int, total: int) -> None:
        """How far the current phase is; goes to listeners only."""
        for listener in self._listeners:
            listener.on_progress(phase, done, total)

    def close(self) -> None:
        """Flush TensorBoard's file and end its thread."""
        board, self._board = self._board, None
        if board is not None:
            board.close()

    def _pass_on(self, kind: str, row: Row) -> None:
        if self._board is not None and kind in SCALARS:
            self._board.write(kind, row)
        for listener in self._listeners:
            listener.on_event(kind, row)


class Board:
    """Scalars in TensorBoard's event format, each event written at once: a full disk is an error here and now, which
    TensorBoard's own writer would meet in a thread of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time():.6f}.{socket.gethostname()}.{os.getpid()}"
        self._writer = RecordWriter(WholeWriter(folder / name))
        try:
            self._add(file_version="brain.Event:2")
        except OSError:
            self.close()
            raise

    def write(self, kind: str, row: Row) -> None:
        """The scalars of one event, at its `step` (or `version`)."""
        values = scalars(kind, row)
        if values:
            self._add(step=int(row.get("step", row.get("version", 0))), summary=_message(values))

    def close(self) -> None:
        self._writer.close()

    def _add(self, **fields: Any) -> None:
        events: Any = event_pb2  # its classes are made when it is loaded, so checkers cannot see them
        self._writer.write(events.Event(wall_time=time.time(), **fields).SerializeToString())


def _message(values: Mapping[str, float]) -> Any:
    """One protobuf summary."""
    proto: Any = summary_pb2
    return proto.Summary(value=[proto.Summary.Value(tag=t, simple_value=v) for t, v in values.items()])


def scalars(kind: str, row: Row) -> dict[str, float]:
    """TensorBoard tags and values of an event; fields that are absent or no numbers are left out."""
    out: dict[str, float] = {}
    for name, tag in SCALARS.get(kind, {}).items():
        value = row.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            out[tag.format(**row)] = float(value)
    seconds = row.get("seconds")
    if isinstance(seconds, Mapping):
        out |= {f"time/{name}": float(value) for name, value in seconds.items()}
    for group in ("drops", "outcomes"):
        counts = row.get(group)
        if kind == "step" and isinstance(counts, Mapping):
            out |= {f"{group}/{name}": float(value) for name, value in counts.items()}
    return out
