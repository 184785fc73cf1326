"""The short convolution over whole sequences as shifted multiply-adds, with its gradient written out."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tidemill.core.errors import InputError
from tidemill.kernels.packing import document_bounds
from tidemill.kernels.pointwise import wide

WIDTH = 4


class _ShortConv(torch.autograd.Function):
    """padded[B, T + 3, C] (wide), w[C, 4] -> silu(conv)[B, T, C]."""

    @staticmethod
    def forward(ctx: Any, padded: Tensor, w: Tensor) -> Tensor:
        y = _convolve(padded, w)
        ctx.save_for_backward(padded, w, y)
        return F.silu(y)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        padded, w, y = ctx.saved_tensors
        sig = torch.sigmoid(y)
        dy = torch.addcmul(sig, y * sig, 1.0 - sig).mul_(grad_outputs[0])
        length = y.shape[1]
        dw = None
        if ctx.needs_input_grad[1]:
            dw = torch.stack([(dy * padded[:, j : j + length]).sum((0, 1)) for j in range(WIDTH)], dim=1)
        dx = None
        if ctx.needs_input_grad[0]:
            dx = torch.zeros_like(padded)
            for j in range(WIDTH):
                dx[:, j : j + length].addcmul_(dy, w[:, j])
        return dx, dw


def _convolve(padded: Tensor, w: Tensor) -> Tensor:
    length = padded.shape[1] - WIDTH + 1
    y = padded[:, :length] * w[:, 0]
    for j in range(1, WIDTH):
        y.addcmul_(padded[:, j : j + length], w[:, j])
    return y


class _Spread(torch.autograd.Function):
    """x[1, T, C] to `places` (all different) of zeros [1, size, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(places)
        return x.new_zeros((1, size, x.shape[2])).index_copy_(1, places, x)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        return grad_outputs[0].index_select(1, places), None, None


class _Take(torch.autograd.Function):
    """The inverse: `places` (all different) of x[1, size, C]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Tensor) -> Tensor:
        ctx.save_for_backward(places)
        ctx.size = x.shape[1]
        return x.index_select(1, places)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (places,) = ctx.saved_tensors
        dy = grad_outputs[0]
        return dy.new_zeros((1, ctx.size, dy.shape[2])).index_copy_(1, places, dy), None


def short_conv_train(x: Tensor, w: Tensor, state: Tensor | None = None, *,
                     cu_seqlens: Tensor | None = None) -> Tensor:
    """silu of the causal width-4 convolution of x[B, T, C] -> [B, T, C] in x's dtype; differentiable in x, w and
    state.

    w[C, 4] or [C, 1, 4]; state[B, 3, C] holds the three inputs before x (None: zeros). fp32 inside (fp64 for fp64).
    With cu_seqlens int64 [n + 1] the one row holds n documents, each after its own state[n, 3, C]. InputError if
    cu_seqlens or the state does not fit.
    """
    xf, taps = wide(x), w.reshape(-1, WIDTH).to(torch.promote_types(x.dtype, torch.float32))
    bounds = document_bounds(x.shape[0], x.shape[1], cu_seqlens)
    if state is not None and state.shape != (len(bounds) - 1, WIDTH - 1, x.shape[2]):
        raise InputError(f"convolution state of shape {tuple(state.shape)}: expected "
                         f"{(len(bounds) - 1, WIDTH - 1, x.shape[2])}", field="state")
    if cu_seqlens is not None:
        places = _places(bounds)
        padded = _Spread.apply(xf, places, x.shape[1] + (WIDTH - 1) * (len(bounds) - 1))
        if state is not None:
            padded = padded + _Spread.apply(state.to(xf.dtype).flatten(0, 1).unsqueeze(0), _states_at(bounds),
                                            padded.shape[1])
        return _Take.apply(_ShortConv.apply(padded, taps), places - (WIDTH - 1)).to(x.dtype)
    if state is None:
        padded = F.pad(xf, (0, 0, WIDTH - 1, 0))
    else:
        padded = torch.cat([state.to(xf.dtype), xf], dim=1)
    return _ShortConv.apply(padded, taps).to(x.dtype)


def halo(x: Tensor, before: Tensor | None = None, *, cu_seqlens: Tensor | None = None) -> Tensor:
    """The last three inputs [B, 3, C] up to the end of the segment x[B, T, C]: the `state` of the segment after it.

    before[B, 3, C] are the inputs before x (None: zeros); they matter when x has fewer than three tokens. With
    cu_seqlens int64 [n + 1] the row holds segments of n documents: before and the result are [n, 3, C].
    """
    bounds = document_bounds(x.shape[0], x.shape[1], cu_seqlens)
    flat, batch = x.flatten(0, 1), len(bounds) - 1
    if before is None:
        before = x.new_zeros((batch, WIDTH - 1, x.shape[2]))
    known = torch.cat([before.to(x.dtype).flatten(0, 1), flat])
    # Counted back from the last token; what lies before the first one is taken from `before`.
    back = torch.arange(WIDTH - 1) - (WIDTH - 1)
    place = bounds.diff().unsqueeze(1) + back
    own = (WIDTH - 1) * torch.arange(batch).unsqueeze(1) + (WIDTH - 1) + place
    return known[torch.where(place < 0, own, place + bounds[:-1].unsqueeze(1) + before[..., 0].numel())]


def _places(bounds: Tensor) -> Tensor:
    """Where tokens stand once every document has room for three inputs before it."""
    lengths = bounds.diff()
    return torch.arange(int(bounds[-1])) + (WIDTH - 1) * (1 + torch.arange(len(lengths)).repeat_interleave(lengths))


def _states_at(bounds: Tensor) -> Tensor:
    """Where these inputs stand, [3 n]."""
    begins = bounds[:-1] + (WIDTH - 1) * torch.arange(len(bounds) - 1)
    return (begins.unsqueeze(1) + torch.arange(WIDTH - 1)).flatten()
