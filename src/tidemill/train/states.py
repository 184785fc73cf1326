"""The colocated loop as a state machine: one machine, one memory, engine and trainer awake in turn.

    BOOT -> SYNC -> POOL_WAKE -> [EVAL] -> GENERATE -> ENGINE_SLEEP -> TRAIN_WAKE -> TRAIN -> [CHECKPOINT]
            ^------------------------------------------- TRAIN_SLEEP <------------------------------/

Rules behind the table: the adapter is synced while the engine's weights are awake and its pools are not, so that peak
memory is bounded; nothing generates between a commit and the waking of the pools; the trainer has freed its activations
and gradients before the engine's pools come back; after the last step the engine is not put to sleep again.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from tidemill.core.errors import TrainError


class State(StrEnum):
    """Who holds memory: see HOLDS."""

    BOOT = "boot"
    SYNC = "sync"
    POOL_WAKE = "pool_wake"
    GENERATE = "generate"
    EVAL = "eval"
    ENGINE_SLEEP = "engine_sleep"
    TRAIN_WAKE = "train_wake"
    TRAIN = "train"
    CHECKPOINT = "checkpoint"
    TRAIN_SLEEP = "train_sleep"
    STOPPED = "stopped"
    FAILED = "failed"


LEGAL: dict[State, frozenset[State]] = {
    State.BOOT: frozenset({State.SYNC}),
    State.SYNC: frozenset({State.POOL_WAKE}),
    State.POOL_WAKE: frozenset({State.GENERATE, State.EVAL, State.STOPPED}),
    State.GENERATE: frozenset({State.ENGINE_SLEEP, State.STOPPED}),
    State.EVAL: frozenset({State.GENERATE, State.STOPPED}),
    State.ENGINE_SLEEP: frozenset({State.TRAIN_WAKE}),
    State.TRAIN_WAKE: frozenset({State.TRAIN}),
    State.TRAIN: frozenset({State.CHECKPOINT, State.TRAIN_SLEEP}),
    State.CHECKPOINT: frozenset({State.TRAIN_SLEEP}),
    State.TRAIN_SLEEP: frozenset({State.SYNC}),
    State.STOPPED: frozenset(),
    State.FAILED: frozenset(),
}
"""Moves of a healthy loop. FAILED can be reached from every state that is not final."""

ENGINE_POOLS = frozenset({State.POOL_WAKE, State.GENERATE, State.EVAL, State.STOPPED})
"""States in which the engine may hold pools (pages and state slots)."""
TRAINER_BUFFERS = frozenset({State.TRAIN_WAKE, State.TRAIN, State.CHECKPOINT})
"""States in which the trainer may hold activations and gradients."""


class StateMachine:
    """Holds the current state and refuses illegal moves. `on_move(old, new)` is told after each."""

    def __init__(self, on_move: Callable[[State, State], None] | None = None) -> None:
        self.state = State.BOOT
        self._on_move = on_move

    def to(self, new: State) -> None:
        """Move, or raise TrainError naming both states (the loop has a bug; nothing is changed)."""
        old = self.state
        legal = LEGAL[old] | (frozenset({State.FAILED}) if LEGAL[old] else frozenset())
        if new not in legal:
            raise TrainError(f"illegal move of the training loop: {old.value} -> {new.value}")
        self.state = new
        if self._on_move:
            self._on_move(old, new)
