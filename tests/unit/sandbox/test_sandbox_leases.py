"""Leases: who owns a group of sandboxes, and when it ends."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidemill.core.clock import ManualClock
from tidemill.core.errors import InputError, NotFoundError
from tidemill.core.launcher import start_time
from tidemill.sandbox.leases import Leases
from tidemill.sandbox.store import Store

PROCESSES = dict[int, int]


@pytest.fixture
def store(tmp_path: Path):
    store = Store(tmp_path / "store.sqlite")
    yield store
    store.close()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def processes() -> PROCESSES:
    return {100: 7, 200: 8}


@pytest.fixture
def leases(store: Store, clock: ManualClock, processes: PROCESSES) -> Leases:
    return Leases(store, clock, grace_s=10.0, process_start=processes.get)


def test_an_owner_that_dies_loses_its_lease_after_the_grace(leases: Leases, clock: ManualClock,
                                                            processes: PROCESSES) -> None:
    assert leases.join("run", owner_pid=100, owner_start=7, ttl_s=None).how == "created"
    assert leases.expired() == []
    del processes[100]
    assert leases.expired() == []
    clock.advance(9.9)
    assert leases.expired() == []
    clock.advance(0.2)
    assert [row.lease for row in leases.expired()] == ["run"]


def test_a_later_process_with_the_same_pid_is_not_the_owner(leases: Leases, clock: ManualClock,
                                                            processes: PROCESSES) -> None:
    leases.join("run", owner_pid=100, owner_start=None, ttl_s=None)
    processes[100] = 99
    leases.expired()
    clock.advance(11)
    assert len(leases.expired()) == 1


def test_within_the_grace_a_new_process_takes_over(leases: Leases, clock: ManualClock, processes: PROCESSES) -> None:
    leases.join("run", owner_pid=100, owner_start=7, ttl_s=None)
    assert leases.join("run", owner_pid=200, owner_start=8, ttl_s=None).how == "shared"
    del processes[100]
    leases.expired()
    joined = leases.join("run", owner_pid=200, owner_start=8, ttl_s=None)
    assert (joined.how, joined.row.owner_pid, joined.row.lost_at) == ("taken_over", 200, None)
    clock.advance(60)
    assert leases.expired() == []
    assert leases.join("run", owner_pid=200, owner_start=8, ttl_s=5.0).how == "renewed"


def test_heartbeats_keep_a_lease_and_revive_a_lost_one(leases: Leases, clock: ManualClock) -> None:
    leases.join("run", owner_pid=None, owner_start=None, ttl_s=5.0)
    clock.advance(4)
    leases.heartbeat("run")
    clock.advance(4)
    assert not leases.lost(leases.rows()[0])
    clock.advance(4)
    leases.expired()
    assert leases.rows()[0].lost_at is not None
    leases.heartbeat("run")
    assert leases.rows()[0].lost_at is None
    clock.advance(6)
    leases.expired()
    clock.advance(11)
    assert len(leases.expired()) == 1


def test_leases_survive_the_service(leases: Leases, store: Store, clock: ManualClock, processes: PROCESSES) -> None:
    leases.join("run", owner_pid=100, owner_start=7, ttl_s=3.0)
    assert Leases(store, clock, grace_s=1.0, process_start=processes.get).rows() == leases.rows()
    leases.forget("run")
    leases.forget("run")
    assert Leases(store, clock, grace_s=1.0, process_start=processes.get).rows() == []


def test_bad_leases_are_refused(leases: Leases) -> None:
    with pytest.raises(InputError, match="ownerPid, ttl or both"):
        leases.join("run", owner_pid=None, owner_start=None, ttl_s=None)
    with pytest.raises(InputError, match="300"):
        leases.join("run", owner_pid=300, owner_start=None, ttl_s=None)
    with pytest.raises(InputError, match="100"):
        leases.join("run", owner_pid=100, owner_start=8, ttl_s=None)
    leases.check("")
    for name in ("run", "other"):
        with pytest.raises(NotFoundError, match=name):
            leases.check(name)
    with pytest.raises(NotFoundError):
        leases.heartbeat("")


def test_this_process_can_own_a_lease(store: Store, clock: ManualClock) -> None:
    real = Leases(store, clock, grace_s=0.0)
    joined = real.join("run", owner_pid=os.getpid(), owner_start=None, ttl_s=None)
    assert joined.row.owner_start == start_time(os.getpid())
    assert real.expired() == []
