"""KDA as a recurrence: one token at a time, the engine's form in every phase.

Source: Kimi Linear report and K3 technical report. The state is fp32 [.., H, K, V] (keys first). Inputs q and k are
already L2-normalised and q scaled by K^-1/2 (`qk_norm`); g and beta are activated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels.norm import l2_norm
from tidemill.kernels.pointwise import sigmoid, softplus


def gate(z: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay g <= 0 of each token, head and key channel, fp32.

    z[R, H, D] is the raw gate projection; A_log[>= H] one value per head (what lies beyond H is padding);
    dt_bias[H·D]. With `lower_bound` (K3: -5): g = lower_bound · sigmoid(exp(A) · (z + dt_bias)), inside
    (lower_bound, 0). Without (Kimi Linear): g = -exp(A) · softplus(z + dt_bias). The bound chooses the function; it
    is no clamp.
    """
    heads, dim = z.shape[-2:]
    rate = A_log.flatten()[:heads].float().exp().unsqueeze(-1)
    zf = z.float() + dt_bias.view(heads, dim)
    if lower_bound is None:
        return softplus(zf).mul_(rate).neg_()
    return sigmoid(zf.mul_(rate)).mul_(lower_bound)


def qk_norm(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """q / |q| · D^-1/2 and k / |k| over the last axis in fp32, eps 1e-6 under the root of the sum."""
    return l2_norm(q).mul_(q.shape[-1] ** -0.5), l2_norm(k)


def step(S: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """One token for B sequences; **S is updated in place**.

    S[B, H, K, V] fp32 contiguous; q, k, g[B, H, K], v[B, H, V], beta[B, H], all fp32. Returns o[B, H, V] fp32, read
    from the state after its update:

        S ← Diag(exp g) S;   S ← S + k ⊗ β (v − Sᵀk);   o = Sᵀ q

    Row-invariant: sequence b has the same bits alone and among others. InputError if S is not fp32 and contiguous.
    """
    if S.dtype is not torch.float32 or not S.is_contiguous():
        raise InputError("KDA state must be a contiguous float32 tensor [B, H, K, V]", field="S")
    batch, heads, kdim, vdim = S.shape
    n = batch * heads
    flat = S.view(n, kdim, vdim)
    flat.mul_(torch.exp(g).view(n, kdim, 1))
    predicted = torch.bmm(k.reshape(n, 1, kdim), flat)
    u = (v.reshape(n, 1, vdim) - predicted).mul_(beta.reshape(n, 1, 1))
    flat.add_(k.reshape(n, kdim, 1) * u)
    return torch.bmm(q.reshape(n, 1, kdim), flat).view(batch, heads, vdim)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`step` over whole sequences: q, k, g[B, T, H, K], v[B, T, H, V], beta[B, T, H] fp32; state[B, H, K, V] or
    None (zeros).

    Returns (o[B, T, H, V], final state); `state` is not mutated. Any split of T gives the same bits.
    """
    batch, length, heads, kdim = q.shape
    S = q.new_zeros((batch, heads, kdim, v.shape[-1])) if state is None else state.contiguous().clone()
    out = torch.empty_like(v)
    for t in range(length):
        out[:, t] = step(S, q[:, t], k[:, t], v[:, t], g[:, t], beta[:, t])
    return out, S
