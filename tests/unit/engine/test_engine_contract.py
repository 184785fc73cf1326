"""The numerics contract as a property: tokens, log-probs and state bytes of a sequence do not depend on what else is
in the batch, how its prompt is cut, whether it lost its residency, slept, or continued a session. And the check must
notice when the engine is broken on purpose."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tidemill.core.engine_api import Completion, FinishReason
from tidemill.engine import batch, runner
from tidemill.engine import messages as m
from tidemill.engine.memory.pools import Pools, StateRecord
from tidemill.engine.memory.residency import Residency
from tidemill.engine.sampling import Sampler
from tidemill.engine.scheduler import Scheduler

Choose = Callable[[int, int], int]
"""An integer between two bounds, both included: from Hypothesis, or from a seeded generator."""

BASES = ("tiny", "toy", "linear")
PASSED: list[float] = []
"""When each scenario of the long run passed."""
pytestmark = pytest.mark.timeout(600)


@dataclass
class Turn:
    given: list[int]
    sampling: dict


@dataclass
class Scenario:
    """Sessions with turns, run together turn by turn; what disturbs them; sizes of the engine."""

    base: str
    sizes: dict
    sessions: list[list[Turn]]
    adapter: bool
    """A sync is committed before the last turn."""
    disturb: list[int] = field(default_factory=list)


def build(choose: Choose) -> Scenario:
    sessions = []
    turns = choose(1, 2)
    for s in range(choose(1, 6)):
        session = []
        for _ in range(turns):
            sampling = {"max_tokens": choose(0, 7), "seed": choose(0, 3), "sequence": s,
                        "temperature": (0.0, 1.0, 1.0, 0.7)[choose(0, 3)], "top_p": (1.0, 0.8)[choose(0, 1)],
                        "top_k": (0, 0, 9)[choose(0, 2)]}
            length = (choose(1, 20), choose(1, 150))[choose(0, 1)]
            first = choose(0, 95)
            given_ids = [(first * 7 + i * i * 5 + i) % 96 for i in range(length)]
            session.append(Turn(given_ids, sampling))
        sessions.append(session)
    running = choose(1, 6)
    sizes = {"max_running": running, "num_slots": running + choose(0, 2), "prefill_chunk": choose(1, 90),
             "max_batched_tokens": running + choose(0, 120), "poison": bool(choose(0, 1))}
    return Scenario(BASES[choose(0, 2)], sizes, sessions, bool(choose(0, 1)),
                    [choose(0, 30) for _ in range(choose(0, 12))])


class Reference:
    """Each sequence alone, its prompt in one piece. One engine per base and adapter, kept."""

    def __init__(self, driver, adapter) -> None:
        self._driver, self._adapter = driver, adapter
        self._engines: dict[tuple[str, bool], object] = {}
        self._known: dict[tuple, tuple[Completion, StateRecord]] = {}

    def engine(self, base: str, adapted: bool):
        key = (base, adapted)
        if key not in self._engines:
            engine = self._driver(base, max_running=1, max_batched_tokens=512, prefill_chunk=512)
            if adapted:
                engine.sync(self._adapter(engine, seed=11), 1)
            self._engines[key] = engine
        return self._engines[key]

    def run(self, base: str, adapted: bool, ids: list[int], sampling: dict) -> tuple[Completion, StateRecord]:
        key = (base, adapted, tuple(ids), tuple(sorted(sampling.items())))
        if key not in self._known:
            self._known[key] = self._compute(base, adapted, ids, sampling)
        return self._known[key]

    def _compute(self, base: str, adapted: bool, ids: list[int], sampling: dict) -> tuple[Completion, StateRecord]:
        engine = self.engine(base, adapted)
        engine.call(m.OpenSession, "ref")
        done = engine.generate(ids, session="ref", scores=True, **sampling)
        record = state(engine, "ref")
        engine.call(m.CloseSession, "ref")
        return done, record


def state(engine, session: str) -> StateRecord:
    return engine.core.pools.record(engine.core._sessions[session], numerics="", version=0)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@dataclass
class Outcome:
    """One turn of one session as the engine under test did it."""

    adapted: bool
    log: list[int]
    turn: Turn
    completion: Completion
    record: StateRecord | None


def execute(scenario: Scenario, driver, adapter) -> list[Outcome]:
    engine = driver(scenario.base, **scenario.sizes)
    names = [f"s{i}" for i in range(len(scenario.sessions))]
    for name in names:
        engine.call(m.OpenSession, name)
    turns = len(scenario.sessions[0])
    disturb = list(scenario.disturb)
    outcomes: list[Outcome] = []
    for t in range(turns):
        adapted = scenario.adapter and t == turns - 1
        if adapted:
            engine.sync(adapter(engine, seed=11), 1)
        logs = [list(engine.core.session_ids(name)) for name in names]
        calls = [engine.start(session[t].given, name=f"{name}.{t}", session=name, scores=True, **session[t].sampling)
                 for name, session in zip(names, scenario.sessions, strict=True)]
        while engine.core.has_work:
            engine.step()
            if disturb:
                shake(engine, disturb.pop())
        for name, log, call, session in zip(names, logs, calls, scenario.sessions, strict=True):
            resident = engine.core._sessions[name].resident
            outcomes.append(Outcome(adapted, [*log, *session[t].given], session[t], engine.result(call),
                                    state(engine, name) if resident else None))
    return outcomes


def compare(scenario: Scenario, outcomes: list[Outcome], reference: Reference) -> None:
    """AssertionError on any difference of bits."""
    for o in outcomes:
        got = o.completion
        want, record = reference.run(scenario.base, o.adapted, o.log, o.turn.sampling)
        assert got.finish_reason is FinishReason.LENGTH, got.error
        assert got.ids == want.ids
        assert got.logprobs == want.logprobs
        assert got.model_logprobs == want.model_logprobs
        skipped = len(o.log) - len(o.turn.given)
        assert got.prompt_logprobs[1:] == want.prompt_logprobs[skipped + 1 :]
        # With nothing computed there is no state yet: what lies in the slot is overwritten by the first token.
        if o.record is not None and 0 < o.record.computed == record.computed:
            for what in ("kda", "taps", "latents"):
                assert same_bytes(getattr(o.record, what), getattr(record, what)), what


def check(scenario: Scenario, driver, adapter, reference: Reference) -> None:
    compare(scenario, execute(scenario, driver, adapter), reference)


def shake(engine, kind: int) -> None:
    """Something that must not matter."""
    running = engine.core.scheduler.running
    if kind < 12 and running:
        engine.core.scheduler.preempt(running[kind % len(running)])
    elif kind == 12:
        engine.core.scheduler.preempt_all()
    elif kind < 15:
        engine.post(m.Sleep, ("pools",) if kind == 13 else ("pools", "derived"))
        engine.post(m.Wake, ("pools",) if kind == 13 else ("pools", "derived"))
    elif kind < 20:
        for sequence in list(engine.core.residency._evictable.values()):
            engine.core.residency.drop(sequence)


@pytest.fixture(scope="module")
def reference(driver, adapter) -> Reference:
    return Reference(driver, adapter)


def drawn(data: st.DataObject) -> Choose:
    return lambda low, high: data.draw(st.integers(low, high))


@settings(max_examples=15)
@given(data=st.data())
def test_a_row_depends_on_itself_and_its_past_only(driver, adapter, reference, data):
    check(build(drawn(data)), driver, adapter, reference)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@settings(max_examples=2000, derandomize=False)
@given(data=st.data())
def test_a_row_depends_on_itself_and_its_past_only_2000(driver, adapter, reference, data):
    check(build(drawn(data)), driver, adapter, reference)
    PASSED.append(time.monotonic())
    if len(PASSED) % 100 == 0:
        seconds = PASSED[-1] - PASSED[0]
        print(f"{len(PASSED)} scenarios held, {seconds:.0f} s", file=sys.__stderr__, flush=True)


def test_a_full_house_at_once(driver, adapter, reference):
    """64 sessions in one batch, uneven lengths, more sessions than slots."""
    rng = random.Random(5)
    sessions = [[Turn([rng.randrange(96) for _ in range(rng.randint(1, 130))],
                      {"max_tokens": 4, "temperature": 1.0, "seed": 1, "sequence": i})] for i in range(64)]
    sizes = {"max_running": 48, "max_batched_tokens": 512, "prefill_chunk": 70}
    check(Scenario("toy", sizes, sessions, False), driver, adapter, reference)


def test_bf16_keeps_the_contract(driver, adapter, reference):
    for seed in range(2):
        scenario = fault_scenario(seed)
        scenario.base = "bf16"
        check(scenario, driver, adapter, reference)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("base", ["tiny", "bf16"])
def test_two_threads_keep_the_contract(driver, adapter, reference, base):
    """Soak only: on two busy cores every parallel region may wait for a descheduled thread."""
    scenario = fault_scenario(1)
    scenario.base = base
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        outcomes = execute(scenario, driver, adapter)
    finally:
        torch.set_num_threads(before)
    compare(scenario, outcomes, reference)  # the reference runs on one thread


# -- planted faults: each breaks the engine in a way that the check must notice ---------------------------------------


def unpadded_linear(patch: pytest.MonkeyPatch) -> None:
    """No row is padded, neither of the batch nor of a product."""
    patch.setattr(batch, "padded_rows", lambda rows: rows)
    patch.setattr(runner, "linear", lambda x, w: F.linear(x.contiguous(), w))


def plain_sigmoid(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(runner, "sigmoid", lambda x: torch.sigmoid(x.float()))


def state_not_cleared(patch: pytest.MonkeyPatch) -> None:
    """A fresh slot keeps the state of its last holder."""
    real = Pools.prepare

    def prepare(self: Pools, residency: Residency) -> None:
        residency.fresh_slots.clear()
        real(self, residency)

    patch.setattr(Pools, "prepare", prepare)


def stale_page(patch: pytest.MonkeyPatch) -> None:
    """Pages after the first never reach the page table."""
    real = Residency._give_pages

    def give(self: Residency, sequence, n: int) -> None:
        had = len(sequence.pages)
        before = self.page_table[sequence.slot].copy()
        real(self, sequence, n)
        if had:
            self.page_table[sequence.slot] = before

    patch.setattr(Residency, "_give_pages", give)
    patch.setattr(Residency, "check", lambda self: None)


def kept_over_commit(patch: pytest.MonkeyPatch) -> None:
    """What was computed under the old adapter stays resident."""
    patch.setattr(Scheduler, "preempt_all", lambda self: None)


def keyed_by_row(patch: pytest.MonkeyPatch) -> None:
    """Random numbers depend on the row in the batch."""
    real = Sampler.draw

    def draw(self: Sampler, logits, requests, slots, positions):
        return real(self, logits, requests, slots, positions + torch.arange(len(requests)).numpy())

    patch.setattr(Sampler, "draw", draw)


def computed_too_far(patch: pytest.MonkeyPatch) -> None:
    """A preempted sequence believes its first token is still computed."""
    real = Residency.pin

    def pin(self: Residency, sequence, tokens: int, *, reserve: int = 0) -> bool:
        fresh = not sequence.resident
        done = real(self, sequence, tokens, reserve=reserve)
        if done and fresh and len(sequence.ids) > 2:
            sequence.computed = 1
        return done

    patch.setattr(Residency, "pin", pin)


FAULTS = (unpadded_linear, plain_sigmoid, state_not_cleared, stale_page, kept_over_commit, keyed_by_row,
          computed_too_far)


def fault_scenario(seed: int) -> Scenario:
    """Crowded and restless enough that every fault can show."""
    rng = random.Random(seed)
    scenario = build(rng.randint)
    scenario.base, scenario.adapter = BASES[seed % 2], True
    scenario.sizes |= {"poison": False, "max_running": 5, "num_slots": 6, "max_batched_tokens": 60}
    scenario.disturb = [1, 30, 30, 12, 30, 2] if seed % 3 == 0 else []
    scenario.sessions = [
        [Turn([rng.randrange(96) for _ in range(rng.randint(40, 100))],
              {"max_tokens": 5, "temperature": 1.0, "seed": 1, "sequence": i}) for _ in range(2)] for i in range(5)]
    return scenario


def test_fault_scenarios_pass_on_the_healthy_engine(driver, adapter, reference):
    for seed in range(4):
        check(fault_scenario(seed), driver, adapter, reference)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_noticed(driver, adapter, reference, monkeypatch, fault):
    for seed in range(4):
        scenario = fault_scenario(seed)
        with monkeypatch.context() as patch:
            fault(patch)
            outcomes = execute(scenario, driver, adapter)
        try:
            compare(scenario, outcomes, reference)
        except AssertionError:
            return
    raise AssertionError(f"{fault.__name__} went unnoticed in four scenarios")
