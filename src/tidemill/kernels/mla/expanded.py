"""Multi-head latent attention with expanded keys and values: the training form over whole sequences.

Scores exist for one block of queries at a time. Kept for backward are the inputs and one fp32 number per token and
head, the logarithm of its softmax denominator; the scores are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from tidemill.kernels.packing import document_bounds
from tidemill.kernels.pointwise import wide

QUERIES = 128
"""Queries of one block."""


def expanded(q: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, scale: float, *,
             cu_seqlens: Tensor | None = None) -> Tensor:
    """Causal attention o[B, T, H, V] = softmax(scale · (q_n·k_n + q_p·p), τ <= t) v, differentiable (first order).

    q[B, T, H, nope + pe], k_nope[B, T, H, nope], k_pe[B, T, pe] shared by the heads, v[B, T, H, V]. Scores, softmax
    and sums in fp32 (fp64 for fp64 inputs), one cast to v's dtype. Padding at the right end of a sequence touches
    no earlier token. With cu_seqlens int64 [n + 1] the one row holds n documents that do not see each other.
    InputError if cu_seqlens does not fit.
    """
    bounds = document_bounds(q.shape[0], q.shape[1], cu_seqlens)
    return _Expanded.apply(q, k_nope, k_pe, v, scale, bounds.diff().tolist())


@dataclass(frozen=True, slots=True)
class _Piece:
    """n documents of one length, one behind the other from flat row `begin` on."""

    begin: int
    n: int
    length: int

    def take(self, x: Tensor) -> Tensor:
        """Their rows of x[B, T, H, D] as fp32 or fp64 [n·H, length, D]."""
        heads, width = x.shape[2:]
        rows = x.reshape(-1, heads, width)[self.begin : self.begin + self.n * self.length]
        return wide(rows).view(self.n, self.length, heads, width).transpose(1, 2).reshape(-1, self.length, width)

    def put(self, out: Tensor, x: Tensor) -> None:
        """The inverse: x[n·H, length, D] into the rows of out[B, T, H, D]."""
        heads, width = out.shape[2:]
        rows = out.view(-1, heads, width)[self.begin : self.begin + self.n * self.length]
        rows.view(self.n, self.length, heads, width).copy_(x.view(self.n, heads, self.length, width).transpose(1, 2))

    def blocks(self) -> Iterator[slice]:
        """Blocks of queries; a block sees the keys before its end."""
        return (slice(i, min(i + QUERIES, self.length)) for i in range(0, self.length, QUERIES))


def _pieces(lengths: list[int]) -> Iterator[_Piece]:
    begin = 0
    for length, run in groupby(lengths):
        n = len(list(run))
        yield _Piece(begin, n, length)
        begin += n * length


def _keys(k_nope: Tensor, k_pe: Tensor) -> Tensor:
    return torch.cat([k_nope, k_pe.unsqueeze(2).expand(*k_nope.shape[:3], -1)], dim=-1)


def _scores(q: Tensor, k: Tensor, block: slice, scale: float) -> Tensor:
    """Masked scores [m, len(block), block.stop]."""
    size = block.stop - block.start
    scores = torch.bmm(q[:, block], k[:, : block.stop].transpose(1, 2)).mul_(scale)
    scores[:, :, block].add_(torch.full((size, size), -torch.inf, dtype=q.dtype).triu_(1))
    return scores


class _Expanded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k_nope: Tensor, k_pe: Tensor, v: Tensor, scale: float,
                lengths: list[int]) -> Tensor:
        keys, out, norms = _keys(k_nope, k_pe), torch.empty_like(v, memory_format=torch.contiguous_format), []
        for piece in _pieces(lengths):
            qp, kp, vp = (piece.take(x) for x in (q, keys, v))
            o, norm = torch.empty_like(vp), qp.new_empty(qp.shape[:2])
            for block in piece.blocks():
                scores = _scores(qp, kp, block, scale)
                torch.logsumexp(scores, -1, out=norm[:, block])
                shares = scores.sub_(norm[:, block, None]).exp_()
                torch.bmm(shares, vp[:, : block.stop], out=o[:, block])
            piece.put(out, o)
            norms.append(norm)
        ctx.save_for_backward(q, k_nope, k_pe, v, *norms)
        ctx.scale, ctx.lengths = scale, lengths
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        q, k_nope, k_pe, v, *norms = ctx.saved_tensors
        keys, dout, scale = _keys(k_nope, k_pe), grad_outputs[0], ctx.scale
        dq, dkeys, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, keys, v))
        for piece, norm in zip(_pieces(ctx.lengths), norms, strict=True):
            qp, kp, vp, do = (piece.take(x) for x in (q, keys, v, dout))
            gq, gk, gv = torch.empty_like(qp), torch.zeros_like(kp), torch.zeros_like(vp)
            for block in piece.blocks():
                seen = slice(0, block.stop)
                shares = _scores(qp, kp, block, scale).sub_(norm[:, block, None]).exp_()
                gv[:, seen].baddbmm_(shares.transpose(1, 2), do[:, block])
                ds = torch.bmm(do[:, block], vp[:, seen].transpose(1, 2)).mul_(shares)
                ds.addcmul_(shares, ds.sum(-1, keepdim=True), value=-1.0).mul_(scale)
                torch.bmm(ds, kp[:, seen], out=gq[:, block])
                gk[:, seen].baddbmm_(ds.transpose(1, 2), qp[:, block])
            for out, gradient in ((dq, gq), (dkeys, gk), (dv, gv)):
                piece.put(out, gradient)
        dk_nope, dk_pe = dkeys.split([k_nope.shape[-1], k_pe.shape[-1]], dim=-1)
        return dq, dk_nope, dk_pe.sum(2), dv, None, None
