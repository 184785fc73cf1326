"""The loop's state table, exhaustively."""

import itertools

import pytest

from tidemill.core.errors import TrainError
from tidemill.train.states import ENGINE_POOLS, LEGAL, TRAINER_BUFFERS, State, StateMachine


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)))
def test_every_pair_is_allowed_or_refused_as_the_table_says(old: State, new: State) -> None:
    seen: list[tuple[State, State]] = []
    machine = StateMachine(lambda a, b: seen.append((a, b)))
    machine.state = old
    if new in LEGAL[old] or (new is State.FAILED and LEGAL[old]):
        machine.to(new)
        assert machine.state is new
        assert seen == [(old, new)]
    else:
        with pytest.raises(TrainError, match=f"{old.value} -> {new.value}"):
            machine.to(new)
        assert machine.state is old
        assert seen == []


def test_engine_pools_and_trainer_buffers_never_coexist() -> None:
    assert not ENGINE_POOLS & TRAINER_BUFFERS


def test_every_state_is_reachable_and_a_step_returns_to_generate() -> None:
    reached, todo = {State.BOOT}, [State.BOOT]
    while todo:
        for nxt in LEGAL[todo.pop()] - reached:
            reached.add(nxt)
            todo.append(nxt)
    assert reached == set(State) - {State.FAILED}
    machine = StateMachine()
    for state in ("sync", "pool_wake", "generate", "engine_sleep", "train_wake", "train", "checkpoint", "train_sleep",
                  "sync", "pool_wake", "eval", "generate", "stopped"):
        machine.to(State(state))
