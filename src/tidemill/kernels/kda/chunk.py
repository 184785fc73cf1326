"""KDA in chunks of 16 tokens, the training form: products over whole chunks, one sequential step per chunk.

Source: Kimi Linear report (WY form) and K3 technical report (bounded decay). Plain torch, differentiable by
autograd except for the triangular inverse, whose gradient is written out. Equals the recurrence to rounding, not by
bits.

Per head and chunk, with G_i the inclusive cumulative log decay inside the chunk and S the incoming state:

    M[i,j] = beta_i Σ_d k_i k_j exp(G_i − G_j)  (j < i)       N[i,j] = Σ_d q_i k_j exp(G_i − G_j)  (j <= i)
    X = (I + M)^-1 Diag(beta)      W = X (exp(G) k)      U = X v
    Ṽ = U − W S      O = (exp(G) q) S + N Ṽ      S' = Diag(exp G_C) S + (exp(G_C − G) k)ᵀ Ṽ
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.core.errors import InputError

CHUNK = 16
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
) -> tuple[Tensor, Tensor]:
    """The recurrence over sequences: q, k, g[B, T, H, K], v[B, T, H, V], beta[B, T, H], state[B, H, K, V] or None
    (zeros).

    q, k normalised and scaled (`qk_norm`); all fp32 (or fp64). `lower_bound` must bound g from below: it is what
    lets decay ratios be split into two factors that fit fp32. None (unbounded decay) forms the ratios pair by pair,
    slower and larger. Returns (o[B, T, H, V], final state), differentiable in every tensor. Earlier outputs do not
    change by a bit when later tokens do. Padding tokens need beta = 0, g = 0 to leave the state alone. InputError
    if the bound does not fit the chunk.
    """
    if lower_bound is not None and (chunk - 1) * -lower_bound > _MAX_EXPONENT:
        raise InputError(
            f"chunk = {chunk} with lower_bound = {lower_bound}: decay ratios overflow fp32", field="chunk",
            remedy=f"Use a chunk of at most {int(_MAX_EXPONENT / -lower_bound) + 1}.",
        )
    batch, length, heads, _ = q.shape
    missing = -length % chunk
    q, k, v, g = (_to_chunks(x, missing, chunk) for x in (q, k, v, g))
    beta = _to_chunks(beta.unsqueeze(-1), missing, chunk)
    n, size = batch * heads, (length + missing) // chunk
    G = g.cumsum(2)
    scores, k_decayed = _pairs(q, k, G, lower_bound)
    attn = scores[:, :, chunk:].tril()
    solved = UnitLowerInverse.apply((scores[:, :, :chunk] * beta).tril(-1)) * beta.transpose(2, 3)
    eG = G.exp()
    both = torch.matmul(solved, torch.cat([eG * k, v], dim=-1))
    reads = torch.cat([both[..., : k.shape[-1]], eG * q], dim=2)
    U = both[..., k.shape[-1] :]
    last = eG[:, :, -1, :, None]
    writes = k_decayed.transpose(2, 3)
    S = q.new_zeros((n, q.shape[-1], v.shape[-1])) if state is None else state.reshape(n, *state.shape[2:])
    new_v: list[Tensor] = []
    from_state: list[Tensor] = []
    for read, u, decay, write in zip(reads.unbind(1), U.unbind(1), last.unbind(1), writes.unbind(1), strict=True):
        seen = torch.bmm(read, S)
        tilde = u - seen[:, :chunk]
        from_state.append(seen[:, chunk:])
        new_v.append(tilde)
        S = torch.baddbmm(S * decay, write, tilde)
    out = torch.stack(from_state, 1) + torch.matmul(attn, torch.stack(new_v, 1))
    out = out.view(batch, heads, size * chunk, -1).transpose(1, 2)
    return out[:, :length], S.view(batch, heads, *S.shape[1:])


def _to_chunks(x: Tensor, missing: int, chunk: int) -> Tensor:
    """[B, T, H, D] -> [B·H, T/chunk, chunk, D], zero-padded in T."""
    if missing:
        x = F.pad(x, (0, 0, 0, 0, 0, missing))
    batch, length, heads, dim = x.shape
    return x.transpose(1, 2).reshape(batch * heads, length // chunk, chunk, dim)


def _pairs(q: Tensor, k: Tensor, G: Tensor, lower_bound: float | None) -> tuple[Tensor, Tensor]:
    """Rows of k (first C) and q (last C) against k with their decay, [n, N, 2C, C]; and exp(G_C − G) k."""
    k_decayed = (G[:, :, -1:] - G).exp() * k
    if lower_bound is None:
        ratio = (G.unsqueeze(3) - G.unsqueeze(2)).clamp_max(0.0).exp() * k.unsqueeze(2)
        rows = torch.cat([(k.unsqueeze(3) * ratio).sum(-1), (q.unsqueeze(3) * ratio).sum(-1)], dim=2)
        return rows, k_decayed
    # The anchor depends on the first row alone (causality). The power of two centres the factors in fp32's range,
    # exactly: adding the constant inside exp instead would round every exponent at its size.
    offset = G - G[:, :, :1]
    centre = 2.0 ** round(-0.5 * (G.shape[2] - 1) * lower_bound / math.log(2.0))
    up = offset.exp() * centre
    rows = torch.cat([k * up, q * up], dim=2)
    return torch.matmul(rows, (k * (offset.neg().exp() * (1.0 / centre))).transpose(2, 3)), k_decayed


class UnitLowerInverse(torch.autograd.Function):
    """(I + M)^-1 for strictly lower triangular M[..., C, C] by nilpotent doubling; exact after log2(C) products."""

    @staticmethod
    def forward(ctx: Any, m: Tensor) -> Tensor:
        size = m.shape[-1]
        eye = torch.eye(size, dtype=m.dtype)
        inverse, power, done = eye - m, m, 2
        while done < size:
            power = torch.matmul(power, power)
            inverse = torch.matmul(inverse, power).add_(inverse)
            done *= 2
        ctx.save_for_backward(inverse)
        return inverse

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> Tensor:
        (inverse,) = ctx.saved_tensors
        t = inverse.transpose(-1, -2)
        return torch.matmul(torch.matmul(t, grad_outputs[0]), t).neg_()
