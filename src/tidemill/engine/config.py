"""Engine sizes, and the one calculation that turns them and a model's per-sequence costs into pools.

Nothing here allocates. A plan that does not fit is refused with its arithmetic before any memory is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from tidemill.core.config import require, strict_config
from tidemill.core.errors import CapacityError

PAGE_SIZE = 64
"""Tokens per page of MLA latents; pages hold absolute positions [64 i, 64 i + 64)."""

AUTO_SHARE = 0.6
"""Share of the memory that is free at start which `pool_bytes: auto` may take; the rest is for activations and the host
program."""


@strict_config
@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of one engine. Counts are tokens or requests, `*_bytes` are bytes."""

    max_model_len: int = 4096
    """Longest sequence, given and sampled tokens together."""
    max_running: int = 64
    """Requests that hold a state slot and are stepped together."""
    max_batched_tokens: int = 2048
    """Rows of one forward: decode rows and prefill rows together; at least max_running."""
    prefill_chunk: int = 512
    """Prefill rows one request may take per step, so that a long prompt does not hold up its neighbours."""
    num_slots: int = 0
    """State slots; more than max_running keeps idle sessions resident. 0: max_running."""
    pool_bytes: int | Literal["auto"] = "auto"
    """Bytes for state slots and pages; `auto` takes what the cgroup and the machine leave, at most what can be used."""
    max_waiting: int = 4096
    """Requests queued beyond those running; more are refused as busy."""
    max_lora_rank: int = 64
    poison: bool = False
    """Debug: fill freed memory with NaN (state slots) or an absurd finite value (pages), so that stale reads show."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_running", "max_batched_tokens", "prefill_chunk", "max_waiting",
                     "max_lora_rank"):
            value = getattr(self, name)
            require(value >= 1, field=name, value=value, expected="an integer >= 1")
        require(self.num_slots == 0 or self.num_slots >= self.max_running, field="num_slots", value=self.num_slots,
                expected=f"0 or at least max_running ({self.max_running})")
        require(self.max_batched_tokens >= self.max_running, field="max_batched_tokens",
                value=self.max_batched_tokens,
                expected=f"at least max_running ({self.max_running}), so that every running request can decode")
        require(self.pool_bytes == "auto" or self.pool_bytes >= 1, field="pool_bytes", value=self.pool_bytes,
                expected="'auto' or bytes >= 1")

    @property
    def slots(self) -> int:
        """State slots asked for."""
        return self.num_slots or self.max_running

    @property
    def pages_per_sequence(self) -> int:
        """Pages of one sequence of max_model_len tokens."""
        return -(-self.max_model_len // PAGE_SIZE)


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """What the pools will hold. All bytes."""

    num_slots: int
    num_pages: int
    pages_per_sequence: int
    slot_bytes: int
    page_bytes: int
    budget_bytes: int
    budget_source: str

    @property
    def pool_bytes(self) -> int:
        """Bytes of both pools."""
        return self.num_slots * self.slot_bytes + self.num_pages * self.page_bytes

    def describe(self) -> str:
        """The arithmetic, for people."""
        tokens = self.num_pages * PAGE_SIZE
        return (
            f"state slots {self.num_slots} x {format_bytes(self.slot_bytes)} = "
            f"{format_bytes(self.num_slots * self.slot_bytes)}; "
            f"pages {self.num_pages} x {format_bytes(self.page_bytes)} = "
            f"{format_bytes(self.num_pages * self.page_bytes)} ({tokens} tokens of {PAGE_SIZE} a page); "
            f"total {format_bytes(self.pool_bytes)} of {format_bytes(self.budget_bytes)} ({self.budget_source})"
        )


def plan_memory(
    config: EngineConfig, *, slot_bytes: int, page_bytes: int, available: Callable[[], tuple[int, str]],
) -> MemoryPlan:
    """Derive slots and pages. `slot_bytes` and `page_bytes` are the model's cost of one slot and one page over all
    layers; `available()` gives (free bytes, where that number comes from) and is asked only for `pool_bytes: auto`.

    Raises CapacityError, with the arithmetic and what to change, if all slots, one page for each and one sequence of
    max_model_len do not fit.
    """
    slots, per_sequence = config.slots, config.pages_per_sequence
    useful_pages = slots * per_sequence
    useful = slots * slot_bytes + useful_pages * page_bytes
    if config.pool_bytes == "auto":
        free, source = available()
        budget = min(int(free * AUTO_SHARE), useful)
        source = f"auto: {AUTO_SHARE:.0%} of {format_bytes(free)} free, {source}"
    else:
        budget, source = config.pool_bytes, "pool_bytes"
    min_pages = max(per_sequence, slots)
    need = slots * slot_bytes + min_pages * page_bytes
    if need > budget:
        per_slot = slot_bytes + page_bytes
        fits = max(0, (budget - (min_pages - slots) * page_bytes) // max(1, per_slot))
        advice = f"Lower max_running/num_slots to at most {fits}, lower max_model_len, or raise pool_bytes." if fits \
            else "Lower max_model_len or raise pool_bytes: not even one request fits."
        raise CapacityError(
            f"the pools do not fit: {slots} state slots x {format_bytes(slot_bytes)} = "
            f"{format_bytes(slots * slot_bytes)} plus at least {min_pages} pages x {format_bytes(page_bytes)} = "
            f"{format_bytes(min_pages * page_bytes)} (one sequence of max_model_len = {config.max_model_len} needs "
            f"{per_sequence} pages) is {format_bytes(need)}, but there are {format_bytes(budget)} ({source}).",
            field="pool_bytes", remedy=advice,
        )
    pages = useful_pages if page_bytes == 0 else min(useful_pages, (budget - slots * slot_bytes) // page_bytes)
    return MemoryPlan(
        num_slots=slots, num_pages=pages, pages_per_sequence=per_sequence, slot_bytes=slot_bytes,
        page_bytes=page_bytes, budget_bytes=budget, budget_source=source,
    )


def format_bytes(n: int) -> str:
    """`53.6 MiB` and the like."""
    value = float(n)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"
