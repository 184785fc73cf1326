"""Free lists, residency, limits, arenas and the memory plan."""

from __future__ import annotations

import math
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tidemill.core.errors import CapacityError, ConfigError, EngineError
from tidemill.engine.config import EngineConfig, MemoryPlan, plan_memory
from tidemill.engine.memory.arena import Arena
from tidemill.engine.memory.free_list import FreeList
from tidemill.engine.memory.limits import available_memory
from tidemill.engine.memory.residency import Residency
from tidemill.engine.request import Sequence


def plan(slots: int, pages: int, per_sequence: int) -> MemoryPlan:
    return MemoryPlan(num_slots=slots, num_pages=pages, pages_per_sequence=per_sequence, slot_bytes=1, page_bytes=1,
                      budget_bytes=slots + pages, budget_source="test")


def test_free_list_refuses_double_free_and_overdraft() -> None:
    pages = FreeList("pages", 3)
    taken = pages.take(2)
    pages.retain(taken)
    assert pages.release(taken) == []
    assert pages.release(taken) == taken
    with pytest.raises(EngineError, match="freed twice"):
        pages.release([taken[0]])
    with pytest.raises(EngineError, match="4 pages wanted, 3 free"):
        pages.take(4)
    with pytest.raises(EngineError, match="cannot be shared"):
        pages.retain([0])
    pages.check()


class ResidencyMachine(RuleBasedStateMachine):
    """Random pins, growth, unpins and drops against the bookkeeping's own recount."""

    @initialize(slots=st.integers(1, 5), pages=st.integers(4, 12))
    def start(self, slots: int, pages: int) -> None:
        self.residency = Residency(plan(slots, pages, 4))
        self.sequences: list[Sequence] = []
        self.pinned: list[Sequence] = []
        self.names = 0

    @rule(tokens=st.integers(1, 256), reserve=st.integers(0, 3))
    def pin_new(self, tokens: int, reserve: int) -> None:
        self.names += 1
        sequence = Sequence(key=f"s{self.names}", ids=[0] * tokens)
        before = (self.residency.slots.num_free, self.residency.pages.num_free, self.residency.num_evicted)
        if self.residency.pin(sequence, tokens, reserve=reserve):
            assert len(sequence.pages) == math.ceil(tokens / 64)
            self.sequences.append(sequence)
            self.pinned.append(sequence)
        else:
            after = (self.residency.slots.num_free, self.residency.pages.num_free, self.residency.num_evicted)
            assert before == after
            assert not sequence.resident

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), tokens=st.integers(1, 256))
    def pin_again(self, data: st.DataObject, tokens: int) -> None:
        sequence = data.draw(st.sampled_from(self.sequences))
        if sequence in self.pinned:
            return
        sequence.ids = [0] * tokens
        resident = sequence.resident
        if self.residency.pin(sequence, tokens):
            self.pinned.append(sequence)
        else:
            assert sequence.resident == resident

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), tokens=st.integers(1, 256))
    def extend(self, data: st.DataObject, tokens: int) -> None:
        sequence = data.draw(st.sampled_from(self.pinned))
        sequence.ids = [0] * max(tokens, len(sequence.ids))
        if self.residency.extend(sequence, tokens):
            assert len(sequence.pages) * 64 >= tokens

    @precondition(lambda self: self.pinned)
    @rule(data=st.data(), drop=st.booleans())
    def let_go(self, data: st.DataObject, drop: bool) -> None:
        sequence = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(sequence)
        (self.residency.drop if drop else self.residency.unpin)(sequence)

    @rule()
    def drop_everything(self) -> None:
        self.residency.drop_all()
        self.pinned.clear()
        assert self.residency.pages.num_used == self.residency.slots.num_used == 0

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "residency"):
            self.residency.check()
            assert all(s.resident for s in self.pinned)


TestResidencyMachine = ResidencyMachine.TestCase
TestResidencyMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_eviction_takes_the_least_recently_used() -> None:
    residency = Residency(plan(2, 4, 2))
    old, new, third = (Sequence(key=k, ids=[0]) for k in ("old", "new", "third"))
    for sequence in (old, new):
        assert residency.pin(sequence, 1)
        residency.unpin(sequence)
    assert residency.pin(old, 1)
    residency.unpin(old)
    assert residency.pin(third, 1)
    assert (old.resident, new.resident) == (True, False)


def test_check_sees_a_page_held_twice() -> None:
    residency = Residency(plan(2, 4, 2))
    a, b = Sequence(key="a", ids=[0]), Sequence(key="b", ids=[0])
    assert residency.pin(a, 1)
    assert residency.pin(b, 1)
    b.pages[0] = a.pages[0]
    with pytest.raises(EngineError, match="pages"):
        residency.check()


def test_arena_gives_memory_back_and_reads_as_zeros() -> None:
    arena = Arena(32 << 20)
    a = arena.tensor((1 << 20, 4), torch.float32)
    b = arena.tensor((4, 1000), torch.bfloat16)
    a.fill_(1.0)
    b.fill_(2.0)
    assert a.data_ptr() % 64 == b.data_ptr() % 64 == 0
    assert arena.resident_bytes() >= a.nbytes
    arena.release()
    assert arena.resident_bytes() == 0
    assert not a.any()
    assert not b.any()
    with pytest.raises(ValueError, match="no room"):
        arena.tensor((32 << 20,), torch.uint8)


def test_limits_read_cgroup_v2_v1_and_meminfo(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:   1000000 kB\n")
    (proc / "self/cgroup").write_text("")
    assert available_memory(proc=proc, cgroup=cgroup) == (1_024_000_000, "MemAvailable")

    (proc / "self/cgroup").write_text("0::/a/b\n")
    (cgroup / "a/b").mkdir(parents=True)
    (cgroup / "a/b/memory.max").write_text("max\n")
    (cgroup / "a/b/memory.current").write_text("5\n")
    (cgroup / "a/memory.max").write_text("1000\n")
    (cgroup / "a/memory.current").write_text("600\n")
    (cgroup / "a/memory.stat").write_text("file 300\ninactive_file 100\n")
    assert available_memory(proc=proc, cgroup=cgroup) == (500, f"cgroup v2 limit of {cgroup / 'a'}")

    (proc / "self/cgroup").write_text("3:cpu,cpuacct:/x\n2:memory:/not/mounted/here\n")
    (cgroup / "memory").mkdir()
    (cgroup / "memory/memory.limit_in_bytes").write_text("800\n")
    (cgroup / "memory/memory.usage_in_bytes").write_text("900\n")
    assert available_memory(proc=proc, cgroup=cgroup) == (0, f"cgroup v1 limit of {cgroup / 'memory'}")
    (cgroup / "memory/memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert available_memory(proc=proc, cgroup=cgroup)[1] == "MemAvailable"


def test_limits_of_this_machine_are_positive() -> None:
    free, source = available_memory()
    assert free > mmap.PAGESIZE
    assert source


def test_plan_fills_the_budget_and_no_more_than_is_useful() -> None:
    config = EngineConfig(max_model_len=1000, max_running=4, pool_bytes="auto")
    small = plan_memory(config, slot_bytes=1000, page_bytes=100, available=lambda: (20_000, "test"))
    assert (small.num_slots, small.num_pages, small.pages_per_sequence) == (4, 64, 16)
    tight = plan_memory(config, slot_bytes=1000, page_bytes=100, available=lambda: (10_000, "test"))
    assert tight.num_pages == (6000 - 4000) // 100
    assert tight.pool_bytes <= 6000
    assert "60%" in tight.describe()


def test_plan_refuses_with_its_arithmetic() -> None:
    config = EngineConfig(max_model_len=4096, max_running=64, pool_bytes=1 << 30)
    with pytest.raises(CapacityError) as caught:
        plan_memory(config, slot_bytes=449_372_160, page_bytes=64 * 27_648, available=lambda: (0, ""))
    text = str(caught.value)
    for part in ("64 state slots x 428.6 MiB", "26.8 GiB", "64 pages x 1.7 MiB", "1.0 GiB (pool_bytes)", "at most 2"):
        assert part in text
    with pytest.raises(CapacityError, match="not even one request fits"):
        plan_memory(EngineConfig(pool_bytes=10), slot_bytes=100, page_bytes=100, available=lambda: (0, ""))


@pytest.mark.parametrize(("field", "value"), [
    ("max_model_len", 0), ("max_running", -1), ("max_batched_tokens", 3), ("prefill_chunk", 0), ("pool_bytes", -5),
    ("num_slots", 2), ("max_waiting", 0),
])
def test_sizes_that_make_no_sense_are_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig(**({"max_running": 8} | {field: value}))
