"""Random lives with random faults: backend calls that fail, guests that die, services that are killed between
any two steps.

After every rule memory, store and machine agree; sandboxes nobody touched keep their variables; failures are
typed.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from tidemill.core.clock import ManualClock
from tidemill.core.errors import BusyError, NotFoundError, SandboxDiedError, SandboxError, TidemillError
from tidemill.core.sandbox_api import SandboxState as S
from tidemill.sandbox.backends.fake import FakeBackend, FakeMachine
from tidemill.sandbox.config import ServiceConfig
from tidemill.sandbox.orchestrator import CreateSpec, Orchestrator
from tidemill.sandbox.reaper import Reaper
from tidemill.sandbox.recovery import recover
from tidemill.sandbox.store import SandboxRow, Store
from tidemill.sandbox.usage import Usage

T = TypeVar("T")
LIMITS = {"timeout_s": 5.0, "max_output_bytes": 1000}


class Killed(BaseException):
    """The service process is gone: nothing it does from here on reaches store or machine."""


class World:
    """A machine and a store behind a service that can be killed, or whose effects can fail, at any step."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.machine = FakeMachine(fault=self.step)
        self.faults: dict[str, int] = {}
        self.steps_left: int | None = None
        self.killed = False
        self.fail_once = False
        """At the end of `steps_left`: one effect fails, instead of the service being killed."""
        self.hits = 0

    def step(self, point: str) -> str | None:
        """Called before every effect on machine or store."""
        if self.steps_left is not None:
            self.steps_left -= 1
            if self.steps_left < 0:
                self.hits += 1
                if self.fail_once:
                    self.steps_left = None
                    raise SandboxError(f"injected at {point}")
                self.killed = True
        if self.killed:
            raise Killed
        if self.faults.get(point, 0) > 0:
            self.faults[point] -= 1
            if point == "reset_full":
                return "full"
            raise SandboxError(f"injected at {point}")
        if point == "reset" and self.faults.get("reset_full", 0) > 0:
            self.faults["reset_full"] -= 1
            return "full"
        return None


class WorldStore(Store):
    """A store whose writes stop when the service is killed."""

    world: World

    def _transaction(self):  # type: ignore[no-untyped-def,override]
        self.world.step("store")
        return super()._transaction()


class Service:
    """One orchestrator after another over one world, and what must be true of them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="tm-", dir="/tmp"))
        self.world = World(self.folder)
        self.clock = ManualClock()
        self.values: dict[str, int | None] = {}
        """What the python session of each living sandbox must answer; None: no session."""
        self.sessions: dict[str, str] = {}
        self.start()

    def start(self) -> None:
        store = WorldStore.__new__(WorldStore)
        store.world = self.world
        WorldStore.__init__(store, self.folder / "store.sqlite", clock=self.clock)
        store.begin_daemon(1, 1)
        config = ServiceConfig(state_dir=self.folder, cache_dir=self.folder, backend="fake", heavy_slots=2)
        self.orchestrator = Orchestrator(config, store, {"fake": FakeBackend(self.world.machine)}, clock=self.clock)
        self.orchestrator.leases.join("run", owner_pid=None, owner_start=None, ttl_s=1e6)
        self.usage = Usage(self.orchestrator)
        self.reaper = Reaper(self.orchestrator)
        self.run(recover(self.orchestrator))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def whole() -> T:
            try:
                return await work
            finally:
                while self.orchestrator._tasks:
                    await asyncio.wait(set(self.orchestrator._tasks))

        return self.loop.run_until_complete(asyncio.wait_for(whole(), 20))

    def restart(self) -> None:
        """The service is gone without a word; a new one begins."""
        world = self.world
        world.steps_left, world.killed, world.faults = None, False, {}
        self.orchestrator.store._db.close()
        self.start()

    def reap(self) -> None:
        """Let the reaper come twice, far enough apart that it tries everything again."""
        for _ in range(2):
            self.run(self.gather(self.in_loop(self.reaper.look)))
            self.clock.advance(6)

    def teardown(self) -> None:
        self.world.faults.clear()
        self.run(self.orchestrator.kill_many(self.orchestrator.rows(), reason="over"))
        assert self.world.machine.boxes == {}
        self.orchestrator.store.close()
        self.loop.close()
        shutil.rmtree(self.folder)

    def row(self, sandbox: str) -> SandboxRow:
        return self.orchestrator.entry(sandbox).row

    def usable(self, sandbox: str) -> bool:
        return sandbox in self.values and self.row(sandbox).state is S.RUNNING

    def forget(self, sandbox: str) -> None:
        self.values.pop(sandbox, None)
        self.sessions.pop(sandbox, None)

    def remember_value(self, sandbox: str, value: int) -> None:
        if sandbox not in self.sessions:
            self.sessions[sandbox] = self.run(self.usage.open_session(sandbox, "python"))
        assert self.run(self.usage.run(sandbox, self.sessions[sandbox], f"x = {value}", **LIMITS)).exit_code == 0
        self.values[sandbox] = value

    def check_value(self, sandbox: str) -> None:
        answer = self.run(self.usage.run(sandbox, self.sessions[sandbox], "print(x)", **LIMITS))
        assert answer.text == f"{self.values[sandbox]}\n"

    def in_loop(self, call: Any) -> Any:
        async def inner() -> Any:
            return call()

        return self.loop.run_until_complete(inner())

    async def gather(self, tasks: list[Any]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)

    def check_agreement(self) -> None:
        """Memory, store and machine say the same; nothing is half done."""
        entries = self.orchestrator.entries
        stored = {row.sandbox_id: row for row in self.orchestrator.store.alive()}
        assert {i: (e.row.state, e.row.runtime_id, e.row.generation) for i, e in entries.items()} == {
            i: (r.state, r.runtime_id, r.generation) for i, r in stored.items()}
        assert all(row.state in (S.RUNNING, S.PAUSED) for row in stored.values())
        assert set(self.world.machine.boxes) == {row.runtime_id for row in stored.values()}
        for row in stored.values():
            assert self.world.machine.boxes[row.runtime_id].paused == (row.state is S.PAUSED)
        assert [o for o in self.orchestrator.store.open_operations() if o.kind != "fork" or not self.world.hits] == []
        assert (self.orchestrator.heavy.active, self.orchestrator.heavy.waiting) == (0, 0)
        assert all(not e.lock.locked() and e.gate.is_set() and not e.doomed for e in entries.values())
        for sandbox, entry in entries.items():
            kept = [s.session_id for s in self.orchestrator.store.sessions(sandbox)]
            assert kept == [*entry.sessions, *(w.session_id for w in entry.waiting)]

    def attempt(self, action: str, sandbox: str) -> Coroutine[Any, Any, object]:
        """One operation on `sandbox`; `replace` is a reset whose in-guest way fails."""
        orchestrator = self.orchestrator
        self.world.faults = {"reset": 1} if action == "replace" else {}
        if action == "create":
            return orchestrator.create_many(CreateSpec(timeout_s=1000), 2)
        if action == "fork":
            return orchestrator.fork(sandbox, 2)
        name = "reset" if action == "replace" else action
        return getattr(orchestrator, name)(sandbox)


ACTIONS = ("create", "pause", "resume", "fork", "reset", "replace", "kill")


@pytest.mark.parametrize("fail_once", [False, True], ids=["killed", "failing"])
@pytest.mark.parametrize("action", ACTIONS)
def test_every_step_of_every_operation_can_be_the_last(action: str, fail_once: bool) -> None:
    """The service is killed (or one effect fails) before the first, second, ... effect, until an operation
    meets none."""
    for steps in range(40):
        service = Service()
        other, sandbox = [r.sandbox_id for r in service.run(service.orchestrator.create_many(CreateSpec(), 2))]
        service.values = {other: None, sandbox: None}
        for name, value in ((other, 1), (sandbox, 2)):
            service.remember_value(name, value)
        service.run(service.usage.write_file(sandbox, "/f", b"", mode=0o644))
        if action == "resume":
            service.run(service.orchestrator.pause(sandbox))
        world = service.world
        world.steps_left, world.fail_once = steps, fail_once
        refused = False
        try:
            service.run(service.attempt(action, sandbox))
        except (Killed, SandboxError):
            refused = True
            assert world.hits
        world.steps_left = None
        if fail_once:
            service.reap()
        else:
            service.restart()
        service.check_agreement()
        alive = service.orchestrator.entries
        service.check_value(other)
        if sandbox in alive and action in ("create", "fork", "kill"):
            service.check_value(sandbox)
        if sandbox in alive and action in ("pause", "resume"):
            if alive[sandbox].row.state is S.PAUSED:
                assert fail_once or action == "pause" or steps == 0  # an intent to resume is carried out
                service.run(service.orchestrator.resume(sandbox))
            service.check_value(sandbox)
        if action in ("create", "fork") or (action != "kill" and not world.hits):
            assert sandbox in alive
        if action in ("reset", "replace") and sandbox in alive and (not refused or (not fail_once and steps >= 2)):
            box = world.machine.boxes[alive[sandbox].row.runtime_id]
            assert (box.files, box.processes) == ({}, {})  # done, or begun and so repeated
        if not fail_once and action in ("pause", "resume"):
            assert sandbox in alive
        for child in set(alive) - {other, sandbox}:
            sessions = service.usage.sessions(child)
            if action == "fork":
                service.values[child], service.sessions[child] = 2, sessions[0][0]
                service.check_value(child)
        service.teardown()
        if not world.hits:
            assert steps > 2
            return
    raise AssertionError(f"{action} takes more than 40 effects")


class Lives(Service, RuleBasedStateMachine):
    sandboxes: Bundle[str] = Bundle("sandboxes")

    # ---- rules

    @rule(target=sandboxes, count=st.integers(1, 3), broken=st.integers(0, 2), lease=st.sampled_from(["", "run"]))
    def create(self, count: int, broken: int, lease: str):
        self.world.faults = {"create": broken}
        made = self.run(self.orchestrator.create_many(CreateSpec(lease=lease, timeout_s=1000), count))
        good = [m.sandbox_id for m in made if isinstance(m, SandboxRow)]
        assert len(good) == max(0, count - broken)
        assert all("injected at create" in str(m) for m in made if not isinstance(m, SandboxRow))
        self.values |= dict.fromkeys(good)
        return multiple(*good)

    @rule(sandbox=sandboxes, value=st.integers(0, 99))
    def remember(self, sandbox: str, value: int) -> None:
        if self.usable(sandbox):
            self.remember_value(sandbox, value)

    @rule(sandbox=sandboxes)
    def recall(self, sandbox: str) -> None:
        if self.usable(sandbox) and self.values[sandbox] is not None:
            self.check_value(sandbox)

    @rule(sandbox=sandboxes, broken=st.booleans(), resume=st.booleans())
    def freeze(self, sandbox: str, broken: bool, resume: bool) -> None:
        if sandbox not in self.values:
            return
        operation = self.orchestrator.resume if resume else self.orchestrator.pause
        before = self.row(sandbox).state
        self.world.faults = {"resume" if resume else "pause": int(broken)}
        try:
            self.run(operation(sandbox))
            assert before is (S.PAUSED if resume else S.RUNNING)
            assert not broken
        except BusyError:
            assert before is (S.RUNNING if resume else S.PAUSED)
        except SandboxError as e:
            assert broken
            assert "injected" in str(e)
            assert self.row(sandbox).state is before

    @rule(target=sandboxes, sandbox=sandboxes, count=st.integers(1, 3), bad=st.integers(0, 2), whole=st.booleans())
    def fork(self, sandbox: str, count: int, bad: int, whole: bool):
        if not self.usable(sandbox):
            return multiple()
        self.world.faults = {"fork_child": bad, "fork": int(whole)}
        try:
            made = self.run(self.orchestrator.fork(sandbox, count))
        except SandboxError as e:
            assert whole
            assert "injected at fork" in str(e)
            return multiple()
        good = [m.sandbox_id for m in made if isinstance(m, SandboxRow)]
        assert len(good) == max(0, count - bad)
        for child in good:
            assert self.row(child).parent_id == sandbox
            self.values[child] = self.values[sandbox]
            if sandbox in self.sessions:
                self.sessions[child] = self.sessions[sandbox]
        return multiple(*good)

    @rule(sandbox=sandboxes, how=st.sampled_from(["in_guest", "reset_full", "reset", "create"]))
    def reset(self, sandbox: str, how: str) -> None:
        if not self.usable(sandbox):
            return
        generation = self.row(sandbox).generation
        self.world.faults = {how: 1} if how != "create" else {"reset": 1, "create": 1}
        session = self.sessions.pop(sandbox, "ses-none")
        try:
            done = self.run(self.orchestrator.reset(sandbox))
        except SandboxDiedError as e:
            assert how == "create"
            assert "injected at create" in str(e)
            del self.values[sandbox]
            return
        replaced = how != "in_guest"
        assert how != "create"
        assert (done.how, done.row.generation) == ("replaced" if replaced else "in_guest", generation + replaced)
        self.values[sandbox] = None
        try:
            self.run(self.usage.run(sandbox, session, "print(x)", **LIMITS))
            raise AssertionError("a session survived a reset")
        except NotFoundError:
            assert self.usage.sessions(sandbox) == []

    @rule(sandbox=sandboxes, resists=st.booleans())
    def kill(self, sandbox: str, resists: bool) -> None:
        self.world.faults = {"kill": int(resists)}
        known = sandbox in self.values
        try:
            assert self.run(self.orchestrator.kill(sandbox)) == known
        except SandboxError as e:
            assert resists
            assert known
            assert "injected at kill" in str(e)
            assert self.row(sandbox).state is S.KILLING
            self.reap()
        self.forget(sandbox)

    @rule(sandbox=sandboxes)
    def die(self, sandbox: str) -> None:
        """The guest ends by itself; the next call finds out."""
        if not self.usable(sandbox):
            return
        box = self.world.machine.boxes.pop(self.row(sandbox).runtime_id)
        box.gone.set()
        try:
            self.run(self.usage.read_file(sandbox, "/x", max_bytes=1))
            raise AssertionError("a dead guest answered")
        except SandboxDiedError:
            self.forget(sandbox)

    @rule(sandbox=consumes(sandboxes))
    def expire(self, sandbox: str) -> None:
        if sandbox not in self.values:
            return
        self.orchestrator.set_timeout(sandbox, 1.0)
        self.clock.advance(1.5)
        self.run(self.gather(self.in_loop(self.reaper.look)))
        self.forget(sandbox)

    @rule(sandbox=sandboxes, action=st.sampled_from(ACTIONS),
          steps=st.integers(0, 8))
    def kill_the_service(self, sandbox: str, action: str, steps: int) -> None:
        """SIGKILL `steps` effects into an operation; a new service recovers."""
        if sandbox not in self.values:
            return
        before = set(self.values)
        work = self.attempt(action, sandbox)
        self.world.steps_left = steps
        with suppress(Killed, TidemillError):
            self.run(work)
        self.restart()
        assert self.orchestrator.store.open_operations() == []
        alive = set(self.orchestrator.entries)
        assert before - {sandbox} <= alive
        if action in ("create", "pause", "resume", "fork"):
            assert sandbox in alive
        if action in ("reset", "replace") or sandbox not in alive:
            self.sessions.pop(sandbox, None)
            if sandbox in alive:
                self.values[sandbox] = None
                known = self.usage.sessions(sandbox)
                if known and self.row(sandbox).state is S.RUNNING:  # the reset had not begun
                    self.run(self.orchestrator.reset(sandbox))
            else:
                self.values.pop(sandbox)
        for child in alive - before:
            self.run(self.orchestrator.kill(child))

    # ---- invariants

    @invariant()
    def memory_store_and_machine_agree(self) -> None:
        self.world.faults = {}  # what a rule left unused must not hit the next
        self.world.hits = 0
        self.check_agreement()
        assert set(self.orchestrator.entries) == set(self.values)
        for sandbox, session in self.sessions.items():
            assert session in [s.session_id for s in self.orchestrator.store.sessions(sandbox)]


Lives.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None,
                                   suppress_health_check=[HealthCheck.too_slow])
TestLives = Lives.TestCase
