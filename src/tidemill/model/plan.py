"""A memory plan: what of a model lies on each of N accelerators, and how many sequences fit beside it.

Follows the layers' own split (tidemill.model.layers): routed experts by expert, attention by heads, feed-forward blocks
by columns; the rest is replicated. Recurrent states are split with the heads. MLA latents are shared by all heads, so
that every accelerator of a tensor group keeps the cache of all its sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

from tidemill.core.config import require
from tidemill.model.config import TextConfig
from tidemill.model.inventory import TensorSpec, inventory
from tidemill.model.names import ExpertForm, split_stacked

GIB = 1 << 30
RESERVE = 0.08
"""Share of each accelerator's memory left for activations, communication and the runtime. An assumption."""
CONTEXTS = (4096, 32_768, 131_072, 1_048_576)
_MOST = 4096
_SPLIT_BY_TENSOR = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "g_proj.weight", "g_b_proj.weight",
                    "f_b_proj.weight", ".b_proj.weight", "o_proj.weight", "_conv1d.weight", "dt_bias",
                    "q_b_proj.weight", "kv_b_proj.weight", "gate_proj.weight", "up_proj.weight", "down_proj.weight")
_WHOLE = ("routed_expert_up_proj.weight", "routed_expert_down_proj.weight")


@dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Bytes are per accelerator."""

    gpus: int
    memory: int
    tensor_group: int
    """Accelerators that share the heads of one copy of the attention layers; gpus / tensor_group such groups serve
    sequences of their own."""
    expert_group: int
    """Accelerators that share the routed experts of one copy."""
    experts: int
    split: int
    """Heads and columns."""
    replicated: dict[str, int]
    """By component."""
    reserve: int
    room: int
    """For states and caches; negative: so much is lacking."""
    sequences: dict[int, int]
    """Whole sequences on all accelerators together, by their length in tokens."""

    @property
    def fits(self) -> bool:
        return bool(self.sequences) and max(self.sequences.values()) > 0


def memory_plan(config: TextConfig, gpus: int, memory: int) -> MemoryPlan:
    """The plan for `gpus` accelerators of `memory` bytes each. ConfigError unless both are above 0."""
    require(gpus >= 1, field="gpus", value=gpus, expected="at least 1")
    require(memory >= 1, field="mem", value=memory, expected="more than 0")
    tensor, expert = _groups(config, gpus)
    experts = split = 0
    replicated: dict[str, int] = {}
    for spec in inventory(config).values():
        size = _stored_bytes(config, spec)
        if spec.is_expert:
            experts += size // expert
        elif spec.name.endswith(_SPLIT_BY_TENSOR) and not spec.name.endswith(_WHOLE):
            split += size // tensor
        else:
            replicated[spec.component] = replicated.get(spec.component, 0) + size
    reserve = int(memory * RESERVE)
    room = memory - reserve - experts - split - sum(replicated.values())
    contexts = sorted({min(n, config.max_position_embeddings) for n in CONTEXTS})
    return MemoryPlan(
        gpus=gpus, memory=memory, tensor_group=tensor, expert_group=expert, experts=experts, split=split,
        replicated=replicated, reserve=reserve, room=room,
        sequences={n: gpus // tensor * max(0, room // _sequence_bytes(config, n, tensor)) for n in contexts},
    )


def gpus_needed(config: TextConfig, memory: int) -> int | None:
    """The smallest number of accelerators of `memory` bytes that hold the model and one sequence; None if replicated
    parts alone are too much for one."""
    seen: set[tuple[int, int]] = set()
    for n in range(1, _MOST + 1):
        groups = _groups(config, n)
        if groups not in seen:
            seen.add(groups)
            if memory_plan(config, n, memory).fits:
                return n
    return None


def _groups(config: TextConfig, gpus: int) -> tuple[int, int]:
    """(tensor group, expert group): the largest divisors of `gpus` that divide heads and columns, or the experts."""
    columns = [config.intermediate_size, config.shared_intermediate_size] if config.moe_layers else [
        config.intermediate_size]
    parts = [config.num_attention_heads, config.linear_attn_config.num_heads, *columns]
    divisors = [n for n in range(1, gpus + 1) if gpus % n == 0]
    tensor = max(n for n in divisors if all(part % n == 0 for part in parts))
    return tensor, max(n for n in divisors if config.num_experts % n == 0)


def _sequence_bytes(config: TextConfig, tokens: int, tensor: int) -> int:
    return -(-config.state_bytes_per_sequence // tensor) + tokens * config.mla_bytes_per_token


def _stored_bytes(config: TextConfig, spec: TensorSpec) -> int:
    form = ExpertForm("stacked", config.quantize_experts)
    return sum(part.plan.nbytes for part in split_stacked(spec, form))
