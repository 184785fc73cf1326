"""The table of moves, exhaustively: every pair of states, every operation from every state."""

from __future__ import annotations

import itertools

import pytest

from tidemill.core.errors import BusyError, SandboxDiedError, SandboxError
from tidemill.core.sandbox_api import SandboxState as S
from tidemill.sandbox.lifecycle import LEGAL, OPERATIONS, TRANSITIONAL, Operation, check_move, check_start, check_usable

EXPECTED = {
    None: {S.CREATING},
    S.CREATING: {S.RUNNING, S.KILLING, S.DEAD},
    S.RUNNING: {S.PAUSING, S.KILLING, S.DEAD},
    S.PAUSING: {S.PAUSED, S.RUNNING, S.KILLING, S.DEAD},
    S.PAUSED: {S.RESUMING, S.KILLING, S.DEAD},
    S.RESUMING: {S.RUNNING, S.PAUSED, S.KILLING, S.DEAD},
    S.KILLING: {S.DEAD},
    S.DEAD: set(),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product([None, *S], list(S))))
def test_every_pair_of_states_is_decided(before: S | None, after: S) -> None:
    if after in EXPECTED[before]:
        check_move("sbx-1", before, after)
    else:
        with pytest.raises(SandboxError, match="illegal move"):
            check_move("sbx-1", before, after)


def test_dead_is_reachable_from_everywhere_and_left_by_nothing() -> None:
    reached = {None}
    while True:
        more = {after for before, after in LEGAL if before in reached} - reached
        if not more:
            break
        reached |= more
    assert reached == {None, *S}
    assert not [move for move in LEGAL if move[0] is S.DEAD]
    assert all((state, S.DEAD) in LEGAL for state in S if state is not S.DEAD)


@pytest.mark.parametrize(("operation", "state"), list(itertools.product(Operation, S)))
def test_every_operation_from_every_state(operation: Operation, state: S) -> None:
    starts = {
        Operation.CREATE: set(), Operation.PAUSE: {S.RUNNING}, Operation.RESUME: {S.PAUSED},
        Operation.FORK: {S.RUNNING}, Operation.RESET: {S.RUNNING}, Operation.KILL: set(S) - {S.DEAD},
    }[operation]
    if state in starts:
        moves = check_start("sbx-1", operation, state)
        assert moves is OPERATIONS[operation]
    elif state is S.DEAD:
        with pytest.raises(SandboxDiedError, match="expired"):
            check_start("sbx-1", operation, state, "expired")
    else:
        with pytest.raises(BusyError, match=state.value):
            check_start("sbx-1", operation, state)


@pytest.mark.parametrize("state", S)
def test_only_running_sandboxes_are_usable(state: S) -> None:
    if state is S.RUNNING:
        check_usable("sbx-1", state)
    else:
        with pytest.raises(SandboxDiedError if state is S.DEAD else BusyError):
            check_usable("sbx-1", state)


def test_transitional_states_are_those_no_operation_ends_in() -> None:
    ends = {m.done for m in OPERATIONS.values()} | {S.PAUSED, S.RUNNING, S.DEAD}
    assert set(S) - ends == TRANSITIONAL
