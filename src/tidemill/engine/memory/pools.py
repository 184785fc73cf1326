"""The tensors behind slots and pages: KDA states, convolution taps, MLA latents.

State layout on the CPU: KDA state [slots, H, K, V] fp32 (keys first), taps [slots, 3, q|k|v channels] (oldest first),
both per KDA layer; latents [pages, 64, normalised c | shared p] in the model's dtype per MLA layer. All are cut from
one arena that sleep gives back to the system.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tidemill.core.errors import IntegrityError
from tidemill.engine.config import PAGE_SIZE, MemoryPlan
from tidemill.engine.memory.arena import Arena, padded_bytes
from tidemill.engine.memory.residency import Residency
from tidemill.engine.request import Sequence
from tidemill.model.config import TextConfig

POISON = 7.7e3
"""What freed pages hold in debug mode: finite, since a masked tail is multiplied by zero, and far from any latent."""


@dataclass(frozen=True, slots=True)
class StateRecord:
    """Everything resident of one sequence, copied out, with the layout it is in.

    kda[layers, H, K, V] fp32; taps[layers, 3, C]; latents[layers, computed, r + p].
    """

    layout: str
    numerics: str
    version: int
    computed: int
    kda: Tensor
    taps: Tensor
    latents: Tensor

    def require_layout(self, layout: str, numerics: str) -> None:
        """Raise IntegrityError unless the record was made in this layout by this arithmetic."""
        for what, have, want in (("layout", self.layout, layout), ("numerics", self.numerics, numerics)):
            if have != want:
                raise IntegrityError(f"state record has {what} {have!r}, this engine uses {want!r}")


class Pools:
    """All state and page tensors of one engine. Zero when made."""

    def __init__(self, model: TextConfig, plan: MemoryPlan, *, poison: bool = False) -> None:
        linear = model.linear_attn_config
        heads, dim = linear.num_heads, linear.head_dim
        kda_shape = (plan.num_slots, heads, dim, dim)
        taps_shape = (plan.num_slots, linear.short_conv_kernel_size - 1, 3 * linear.width)
        width = model.kv_lora_rank + model.qk_rope_head_dim
        page_shape = (plan.num_pages, PAGE_SIZE, width)
        dtype = model.torch_dtype
        self.nbytes = (
            len(model.kda_layers) * (padded_bytes(kda_shape, torch.float32) + padded_bytes(taps_shape, dtype))
            + len(model.mla_layers) * padded_bytes(page_shape, dtype)
        )
        self.arena = Arena(self.nbytes)
        self.kda = {layer: self.arena.tensor(kda_shape, torch.float32) for layer in model.kda_layers}
        self.taps = {layer: self.arena.tensor(taps_shape, dtype) for layer in model.kda_layers}
        self.latents = {layer: self.arena.tensor(page_shape, dtype) for layer in model.mla_layers}
        self.layout = f"cpu kda[{heads},{dim},{dim}] float32 keys-first; taps[3,{3 * linear.width}]; " \
                      f"latents[{PAGE_SIZE},{width}] {model.dtype}"
        self._poison = poison

    @staticmethod
    def slot_bytes(model: TextConfig) -> int:
        """Bytes of one state slot over all KDA layers."""
        return model.state_bytes_per_sequence

    @staticmethod
    def page_bytes(model: TextConfig) -> int:
        """Bytes of one page over all MLA layers."""
        return model.mla_bytes_per_token * PAGE_SIZE

    def prepare(self, residency: Residency) -> None:
        """Clear what was handed out since the last call, before its first use.

        A slot must read as the state of an empty sequence. A page must be finite where it is masked, whatever its last
        holder left there, so it is cleared too (in debug mode it keeps an absurd value, to show that nobody reads it).
        """
        if self._poison:
            _fill(self.kda, residency.freed_slots, torch.nan)
            _fill(self.taps, residency.freed_slots, torch.nan)
            _fill(self.latents, [*residency.freed_pages, *residency.fresh_pages], POISON)
        else:
            _fill(self.latents, residency.fresh_pages, 0.0)
        _fill(self.kda, residency.fresh_slots, 0.0)
        _fill(self.taps, residency.fresh_slots, 0.0)
        for places in (residency.freed_slots, residency.freed_pages, residency.fresh_slots, residency.fresh_pages):
            places.clear()

    def record(self, sequence: Sequence, *, numerics: str, version: int) -> StateRecord:
        """Copy out what is resident of `sequence`."""
        pages = torch.tensor(sequence.pages, dtype=torch.int64)

        def stack(parts: list[Tensor]) -> Tensor:
            return torch.stack(parts) if parts else torch.empty(0)

        return StateRecord(
            layout=self.layout, numerics=numerics, version=version, computed=sequence.computed,
            kda=stack([t[sequence.slot] for t in self.kda.values()]),
            taps=stack([t[sequence.slot] for t in self.taps.values()]),
            latents=stack([t[pages].flatten(0, 1)[: sequence.computed] for t in self.latents.values()]),
        )


def _fill(tensors: dict[int, Tensor], places: list[int], value: float) -> None:
    if not places:
        return
    index = torch.tensor(places, dtype=torch.int64)
    for tensor in tensors.values():
        tensor.index_fill_(0, index, value)
