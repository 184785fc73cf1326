"""KDA over segments of one sequence that are worked on apart (context parallelism), and their composition.

Source: K3 technical report, eq. 17. A segment turns the state before it into S' = Φ S + S̃, with Φ the product of its
tokens' (I − β k kᵀ) Diag(exp g), later ones on the left, and S̃ what it makes of a zero state. Columns of the state do
not mix, so one walk with a state [0 | identity] gives both; what its second half reads is how the outputs depend on S.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels.kda.chunk import chunk


@dataclass(frozen=True, slots=True)
class Transition:
    """S -> phi S + own, for B sequences: phi[B, H, K, K], own[B, H, K, V]."""

    phi: Tensor
    own: Tensor

    def __call__(self, state: Tensor) -> Tensor:
        """The state after the segment, [B, H, K, V], from the one before it."""
        return self.phi @ state + self.own

    def then(self, later: Transition) -> Transition:
        """This segment followed by `later`, as one transition. Associative."""
        return Transition(later.phi @ self.phi, later(self.own))


@dataclass(frozen=True, slots=True)
class Segment:
    """A segment without its past: outputs from a zero state own[B, T, H, V], reads[B, T, H, K] = Φ_tᵀ q_t with Φ_t up
    to and including token t, and the transition of the whole."""

    own: Tensor
    reads: Tensor
    transition: Transition

    def outputs(self, state: Tensor) -> Tensor:
        """o[B, T, H, V] of the segment after the state[B, H, K, V] before it."""
        return self.own + torch.einsum("bthk,bhkv->bthv", self.reads, state)


def segment(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, lower_bound: float | None = -5.0) -> Segment:
    """One segment of `chunk`'s inputs: q, k, g[B, T, H, K], v[B, T, H, V], beta[B, T, H], fp32 or fp64.

    Every segment can run at once, on ranks of its own. Exchanging the transitions, composing those before one's own
    (`Transition.then`) and calling `Segment.outputs` gives what one pass over the sequence gives, to rounding.
    Differentiable (first order). Costs a walk with K more columns of state. The short convolutions before it need the
    three inputs before the segment (`conv.halo`).
    """
    batch, _, heads, keys = q.shape
    identity = torch.eye(keys, dtype=q.dtype).expand(batch, heads, -1, -1)
    wide_v = F.pad(v, (0, keys))
    o, state = chunk(q, k, wide_v, g, beta, F.pad(identity, (v.shape[-1], 0)), lower_bound=lower_bound)
    own, reads = o.split([v.shape[-1], keys], dim=-1)
    from_zero, phi = state.split([v.shape[-1], keys], dim=-1)
    return Segment(own, reads, Transition(phi, from_zero))


def compose(transitions: list[Transition], state: Tensor) -> list[Tensor]:
    """The states[B, H, K, V] before each of the consecutive segments, and after the last: one more than `transitions`.

    InputError if a transition does not fit the state.
    """
    states = [state]
    for index, step in enumerate(transitions):
        if step.own.shape != state.shape:
            raise InputError(f"transition {index} moves states of shape {tuple(step.own.shape)}: "
                             f"expected {tuple(state.shape)}", field="transitions")
        states.append(step(states[-1]))
    return states
