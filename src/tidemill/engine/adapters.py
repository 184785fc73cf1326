"""Live adapter and shadow slot."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from tidemill.kernels.moe import ExpertLora

Factors = tuple[Tensor, Tensor, float]
"""A[r, K], B[N, r] (rank padded to 16) and the scale alpha / r of one adapted linear map."""


@dataclass(slots=True)
class LayerAdapter:
    attn_out: Factors | None = None
    mla_q: Factors | None = None
    mla_kv: Factors | None = None
    dense_gate: Factors | None = None
    dense_up: Factors | None = None
    dense_down: Factors | None = None
    shared_gate: Factors | None = None
    shared_up: Factors | None = None
    shared_down: Factors | None = None
    experts: ExpertLora | None = None


@dataclass(slots=True)
class LiveAdapter:
    layers: list[LayerAdapter]


class AdapterStore:
    def __init__(self, weights, *, max_rank):
        self.version = 0
        self.digest = ""
        self.live = None
