"""The life of a sandbox as data: states, operations, and the moves each may make.

An operation is three moves at most: into the state held while it works (written to the store as the intent),
and out of it to success or back (written as the result). Fork and reset work on a running sandbox without
leaving `running`; their intent is the operation row alone. Knows neither backends nor the store.

        create                    pause                     resume
    ·  ───────▶ creating ─▶ running ───▶ pausing ─▶ paused ───▶ resuming ─▶ running
                    │         │  ▲          │         │            │
                    │         │  └──────────┘         │◀───────────┘   (an operation that failed without harm)
                    ▼         ▼                       ▼
                 killing ◀────┴───────────────────────┘        every state but `dead` may be found dead
                    └──▶ dead
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tidemill.core.errors import BusyError, SandboxDiedError, SandboxError
from tidemill.core.sandbox_api import SandboxState

S = SandboxState

TRANSITIONAL = frozenset({S.CREATING, S.PAUSING, S.RESUMING, S.KILLING})
"""States held only while an operation works. Found at start of the service, they mean it was interrupted."""


class Operation(StrEnum):
    """What can be done to a sandbox's life."""

    CREATE = "create"
    PAUSE = "pause"
    RESUME = "resume"
    FORK = "fork"
    RESET = "reset"
    KILL = "kill"


@dataclass(frozen=True, slots=True)
class Moves:
    """From which states an operation may start (None: a sandbox not yet born), what it holds, and where it
    ends.

    `undone` is the state after a failure that left the sandbox as it was; a failure that harmed it always
    ends in `dead`.
    """

    start: frozenset[SandboxState | None]
    during: SandboxState
    done: SandboxState
    undone: SandboxState


OPERATIONS: dict[Operation, Moves] = {
    Operation.CREATE: Moves(frozenset({None}), S.CREATING, S.RUNNING, S.DEAD),
    Operation.PAUSE: Moves(frozenset({S.RUNNING}), S.PAUSING, S.PAUSED, S.RUNNING),
    Operation.RESUME: Moves(frozenset({S.PAUSED}), S.RESUMING, S.RUNNING, S.PAUSED),
    Operation.FORK: Moves(frozenset({S.RUNNING}), S.RUNNING, S.RUNNING, S.RUNNING),
    Operation.RESET: Moves(frozenset({S.RUNNING}), S.RUNNING, S.RUNNING, S.DEAD),
    Operation.KILL: Moves(frozenset({S.CREATING, S.RUNNING, S.PAUSING, S.PAUSED, S.RESUMING, S.KILLING}),
                          S.KILLING, S.DEAD, S.KILLING),
}
"""Kill may start from transitional states because recovery ends interrupted operations with it."""


def _legal_moves() -> frozenset[tuple[SandboxState | None, SandboxState]]:
    moves: set[tuple[SandboxState | None, SandboxState]] = {(s, S.DEAD) for s in S if s is not S.DEAD}
    for op in OPERATIONS.values():
        moves |= {(start, op.during) for start in op.start}
        moves |= {(op.during, op.done), (op.during, op.undone)}
    return frozenset((a, b) for a, b in moves if a is not b)


LEGAL: frozenset[tuple[SandboxState | None, SandboxState]] = _legal_moves()
"""Every pair (from, to) the store accepts."""


def check_move(sandbox_id: str, before: SandboxState | None, after: SandboxState) -> None:
    """Raise SandboxError if the service itself tries a move that is not in the table (a defect, not a user's
    mistake)."""
    if (before, after) not in LEGAL:
        raise SandboxError(f"{sandbox_id}: illegal move {before.value if before else 'unborn'} -> {after.value}")


def check_start(sandbox_id: str, operation: Operation, state: SandboxState, reason: str = "") -> Moves:
    """The moves of `operation` if it may start from `state`; raises SandboxDiedError from `dead`, else BusyError."""
    moves = OPERATIONS[operation]
    if state in moves.start:
        return moves
    if state is S.DEAD:
        raise dead_error(sandbox_id, reason)
    legal = sorted(s.value for s in moves.start if s is not None and s not in TRANSITIONAL)
    raise BusyError(f"{sandbox_id} is {state.value}: {operation.value} needs it to be {' or '.join(legal)}.",
                    remedy=_REMEDY.get((operation, state), ""))


def check_usable(sandbox_id: str, state: SandboxState, reason: str = "") -> None:
    """Raise unless commands, sessions and files may be used in `state`."""
    if state is S.RUNNING:
        return
    if state is S.DEAD:
        raise dead_error(sandbox_id, reason)
    raise BusyError(f"{sandbox_id} is {state.value}, not running.",
                    remedy="Resume it first." if state is S.PAUSED else "Try again when the operation has ended.")


def dead_error(sandbox_id: str, reason: str) -> SandboxDiedError:
    """The error for any use of a sandbox that has ended."""
    return SandboxDiedError(f"sandbox {sandbox_id} has ended ({reason or 'no reason recorded'}).")


_REMEDY = {
    (Operation.PAUSE, S.PAUSED): "It is already paused.",
    (Operation.RESUME, S.RUNNING): "It is already running.",
    (Operation.FORK, S.PAUSED): "Resume it first.",
    (Operation.RESET, S.PAUSED): "Resume it first.",
}
