"""KDA in chunks of 16 tokens, the training form: products over whole chunks, one sequential step per chunk.

Source: Kimi Linear report (WY form) and K3 technical report (bounded decay). Plain torch with the gradient written
out: kept for backward are the inputs and the state before every eighth chunk; the rest is computed again, eight chunks
at a time. Equals the recurrence to rounding, not by bits. README.md has the derivation of both passes.

Per head and chunk, with G_i the inclusive cumulative log decay inside the chunk and S the incoming state:

    A[i,j] = Σ_d k_i k_j exp(G_i − G_j)      N[i,j] = Σ_d q_i k_j exp(G_i − G_j)  (j <= i)
    M = Diag(beta) A  (j < i)      R = (I + M)^-1      D = v − (exp(G) k) S      Ṽ = R Diag(beta) D
    O = (exp(G) q) S + N Ṽ         S' = Diag(exp G_C) S + (exp(G_C − G) k)ᵀ Ṽ
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels.kda.ratios import Factored, Pairwise, Ratios
from tidemill.kernels.packing import Blocks, cut, document_bounds

CHUNK = 16
GROUP = 8
"""Chunks that are worked on at once, and chunks from one kept state to the next: K·V / 128 numbers a token and head."""
_MAX_EXPONENT = 80.0
"""exp of this stays below the largest fp32 with room for the sum over channels."""


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor | None = None,
    *,
    lower_bound: float | None = -5.0,
    chunk: int = CHUNK,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The recurrence over sequences: q, k, g[B, T, H, K], v[B, T, H, V], beta[B, T, H], state[B, H, K, V] or None
    (zeros).

    q, k normalised and scaled (`qk_norm`); all fp32 (or fp64). `lower_bound` must bound g from below: it is what
    lets decay ratios be split into two factors that fit fp32. None (unbounded decay) forms the ratios pair by pair,
    slower. With cu_seqlens int64 [n + 1] the inputs hold n documents in one row (B = 1), each with a state of its own:
    state[n, H, K, V]. Returns (o[B, T, H, V], final state), differentiable (first order) in every tensor. Earlier
    outputs do not change by a bit when later tokens do. Padding tokens need beta = 0, g = 0 to leave the state alone.
    InputError if the bound does not fit the chunk, or cu_seqlens or the state does not fit the inputs.
    """
    if lower_bound is not None and (chunk - 1) * -lower_bound > _MAX_EXPONENT:
        raise InputError(
            f"chunk = {chunk} with lower_bound = {lower_bound}: decay ratios overflow fp32", field="chunk",
            remedy=f"Use a chunk of at most {int(_MAX_EXPONENT / -lower_bound) + 1}.",
        )
    bounds = document_bounds(q.shape[0], q.shape[1], cu_seqlens)
    shape = (bounds.numel() - 1, q.shape[2], q.shape[3], v.shape[3])
    if state is None:
        state = q.new_zeros(shape)
    elif state.shape != shape:
        raise InputError(f"KDA state of shape {tuple(state.shape)}: expected {shape}", field="state")
    return _Chunk.apply(q, k, v, g, beta, state, cut(bounds, chunk), lower_bound)


class _Chunk(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, blocks: Blocks,
                lower_bound: float | None) -> tuple[Tensor, Tensor]:
        out = _Scatter(v)
        S = state.index_select(0, blocks.order).flatten(0, 1)
        kept: list[Tensor] = []
        for first in range(0, len(blocks.counts), GROUP):
            group = _Group(q, k, v, g, beta, blocks, first, lower_bound)
            kept.append(S[: group.widest].clone())
            out.put(group.forward(S), group.rows, group.spare)
        ctx.save_for_backward(q, k, v, g, beta, *kept)
        ctx.blocks, ctx.lower_bound = blocks, lower_bound
        return out.result(), _by_document(S, state, blocks)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, g, beta, *kept = ctx.saved_tensors
        blocks: Blocks = ctx.blocks
        dout, dstate = grad_outputs
        dS = dstate.index_select(0, blocks.order).flatten(0, 1)
        outs = [_Scatter(x) for x in (q, k, v, g, beta)]
        for index in reversed(range(len(kept))):
            group = _Group(q, k, v, g, beta, blocks, index * GROUP, ctx.lower_bound)
            group.replay(kept[index])
            for out, gradient in zip(outs, group.backward(group.take(dout), dS), strict=True):
                out.put(gradient, group.rows, group.spare)
        return *(out.result() for out in outs), _by_document(dS, dstate, blocks), None, None


class _Group:
    """Some consecutive chunks of every document, as [m, C, ·] with m = blocks · heads, without gradients."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, blocks: Blocks, first: int,
                 lower_bound: float | None) -> None:
        heads, last = q.shape[2], min(first + GROUP, len(blocks.counts))
        slots = blocks.slots(first, last)
        self.size = blocks.size
        self.rows, self.spare = blocks.rows(slots, heads)
        self.steps = [slice((a - slots.start) * heads, (b - slots.start) * heads)
                      for a, b in zip(blocks.starts[first:last], blocks.starts[first + 1 : last + 1], strict=True)]
        self.widest = blocks.counts[first] * heads
        self.q, self.k, self.v, g, self.beta = (self.take(x) for x in (q, k, v, g, beta.unsqueeze(-1)))
        G = g.cumsum(1)
        self.eG = G.exp()
        self.last = self.eG[:, -1, :, None]
        self.ratios: Ratios = (Pairwise(self.q, self.k, g) if lower_bound is None
                               else Factored(self.q, self.k, G, lower_bound))
        self.to_end = self.ratios.to_end
        products = self.ratios.products()
        self.A, self.N = products[:, : self.size].tril(-1), products[:, self.size :].tril()
        self.R = unit_lower_inverse(self.A * self.beta)
        self.reads = torch.cat([self.eG * self.k, self.eG * self.q], dim=1)
        self.writes = self.to_end * self.k
        self.X = self.R * self.beta.transpose(1, 2)

    def take(self, x: Tensor) -> Tensor:
        """x[B, T, H, D] as chunks [m, C, D], zero where a chunk has no token."""
        flat = x.reshape(-1, x.shape[-1]).index_select(0, self.rows)
        if self.spare.numel():
            flat[self.spare] = 0.0
        return flat.view(-1, self.size, x.shape[-1])

    def forward(self, S: Tensor) -> Tensor:
        """Output [m, C, V] of the group from the states S[>= widest, K, V], which are moved on in place."""
        seen, tilde = self._buffers()
        for step in self.steps:
            self._meet(step, S[: step.stop - step.start], seen, tilde)
            S[: step.stop - step.start].mul_(self.last[step]).baddbmm_(self.writes[step].transpose(1, 2), tilde[step])
        return torch.baddbmm(seen[:, self.size :], self.N, tilde)

    def replay(self, S: Tensor) -> None:
        """The walk of `forward` again, without its output: leaves the state before each chunk and what v met there."""
        self.missing, self.tilde = self._buffers()
        self.states = S.new_empty((self.v.shape[0], *S.shape[1:]))
        self.states[self.steps[0]] = S
        for index, step in enumerate(self.steps):
            self._meet(step, self.states[step], self.missing, self.tilde)
            if index + 1 < len(self.steps):
                after = self.steps[index + 1]
                stay = slice(step.start, step.start + after.stop - after.start)
                torch.mul(self.states[stay], self.last[stay], out=self.states[after])
                self.states[after].baddbmm_(self.writes[stay].transpose(1, 2), self.tilde[stay])

    def _buffers(self) -> tuple[Tensor, Tensor]:
        m, C, V = self.v.shape
        return self.v.new_empty((m, 2 * C, V)), self.v.new_empty((m, C, V))

    def _meet(self, step: slice, state: Tensor, seen: Tensor, tilde: Tensor) -> None:
        """Write D = v − (exp(G) k) S above (exp(G) q) S into seen[step], and Ṽ into tilde[step]."""
        torch.bmm(self.reads[step], state, out=seen[step])
        missing = seen[step, : self.size]
        torch.sub(self.v[step], missing, out=missing)
        torch.bmm(self.X[step], missing, out=tilde[step])

    def backward(self, dout: Tensor, dS: Tensor) -> tuple[Tensor, ...]:
        """Gradients of q, k, v, g [m, C, ·] and beta [m, C, 1] from dout[m, C, V] and dS[>= widest, K, V], the gradient
        of the states after the group, which is moved back to the states before it in place."""
        C, beta = self.size, self.beta
        # E = Rᵀ dṼ. Walked backwards: dṼ = Nᵀ dO + (exp(G_C − G) k) dS',
        # dS = Diag(exp G_C) dS' + (exp(G) q)ᵀ dO − (exp(G) k)ᵀ Diag(beta) E.
        E, dV = torch.empty_like(dout), torch.bmm(self.N.transpose(1, 2), dout)
        R, dstates = self.R.transpose(1, 2), torch.empty_like(self.states)
        reads = torch.cat([self.reads[:, :C] * beta.neg(), self.reads[:, C:]], dim=1).transpose(1, 2)
        for step in reversed(self.steps):
            d = dS[: step.stop - step.start]
            dstates[step] = d
            torch.bmm(R[step], dV[step].baddbmm_(self.writes[step], d), out=E[step])
            d.mul_(self.last[step]).baddbmm_(reads[step], torch.cat([E[step], dout[step]], dim=1))
        both = torch.cat([E, dout], dim=1)
        # dM = −E Ṽᵀ and dbeta = Σ E ∘ D + Σ_j dM ∘ A: no product with the inverse is left.
        dpairs = torch.bmm(both, self.tilde.transpose(1, 2))
        dM, dN = dpairs[:, :C].tril(-1).neg_(), dpairs[:, C:].tril()
        dbeta = (E * self.missing[:, :C]).sum(-1, keepdim=True).add_((dM * self.A).sum(-1, keepdim=True))
        row_k, row_q, column_k = self.ratios.backward(torch.cat([dM * beta, dN], dim=1))
        dreads = torch.bmm(both, self.states.transpose(1, 2))
        dq = row_q.addcmul_(dreads[:, C:], self.eG)
        row_k = row_k.addcmul_(dreads[:, :C] * beta, self.eG, value=-1.0)
        dwrites = torch.bmm(self.tilde, dstates.transpose(1, 2)).mul_(self.to_end)
        column_k = column_k.add_(dwrites)
        dG = (self.q * dq).addcmul_(self.k, row_k - column_k)
        decay = (dstates.mul_(self.states).sum(-1)).mul_(self.last.squeeze(-1))
        dG[:, -1] += decay.add_((dwrites * self.k).sum(1))
        return dq, row_k.add_(column_k), E * beta, torch.matmul(torch.ones(C, C, dtype=dG.dtype).triu(), dG), dbeta


class _Scatter:
    """A tensor like x[B, T, H(, D)], filled chunk by chunk. A row more at its end takes what no token asked for."""

    def __init__(self, x: Tensor) -> None:
        self._shape = x.shape
        rows = x.shape[0] * x.shape[1] * x.shape[2]
        self._flat = x.new_empty((rows + 1, x.numel() // max(rows, 1)))

    def put(self, chunks: Tensor, rows: Tensor, spare: Tensor) -> None:
        """chunks[m, C, D] to the rows they came from."""
        if spare.numel():
            rows = rows.clone()
            rows[spare] = self._flat.shape[0] - 1
        self._flat.index_copy_(0, rows, chunks.flatten(0, 1))

    def result(self) -> Tensor:
        return self._flat[:-1].view(self._shape)


def _by_document(S: Tensor, like: Tensor, blocks: Blocks) -> Tensor:
    """States ordered by rank back in the order of the documents."""
    return torch.empty_like(like).index_copy_(0, blocks.order, S.view(like.shape))


def unit_lower_inverse(m: Tensor) -> Tensor:
    """(I + M)^-1 for strictly lower triangular M[..., C, C] by nilpotent doubling; exact after log2(C) products. No
    gradient."""
    size = m.shape[-1]
    inverse, power, done = torch.eye(size, dtype=m.dtype) - m, m, 2
    while done < size:
        power = torch.matmul(power, power)
        inverse = torch.matmul(inverse, power).add_(inverse)
        done *= 2
    return inverse
