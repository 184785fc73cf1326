"""MXFP8: blocks of 32 E4M3 values with one E8M0 scale (OCP Microscaling Formats), for the inputs of expert products.

Does no matrix product: activations are rounded, then multiplied in the model's dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tidemill.core.errors import InputError

BLOCK = 32
_TOP_EXPONENT = 8
"""Exponent of the largest E4M3 value, 448 = 1.75 · 2^8."""
_LARGEST = 448.0


def encode(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x[..., K] along its last axis; K a multiple of 32. Returns elements float8_e4m3fn [..., K] and scale u8
    [..., K/32].

    Scale byte 127 + floor(log2 amax) − 8, within 0..254; elements to the nearest E4M3 value, ties to the even code,
    saturating at ±448. An all-zero block gets scale 127 and zero codes. InputError if K is not a multiple of 32 or x
    holds NaN or infinity.
    """
    if x.shape[-1] % BLOCK:
        raise InputError(f"MXFP8 input width = {x.shape[-1]}: expected a multiple of {BLOCK}", field="x")
    blocks = x.detach().float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise InputError("MXFP8 cannot encode NaN or infinity", field="x", remedy="Look for a diverged training step.")
    floor_log2 = torch.frexp(amax).exponent - 1
    scale = torch.where(amax > 0, (127 + floor_log2 - _TOP_EXPONENT).clamp(0, 254), 127).to(torch.uint8)
    # Torch's own conversion saturates here as well, but does not promise it for every device.
    scaled = (blocks / _scale_values(scale)).clamp_(-_LARGEST, _LARGEST)
    return scaled.to(torch.float8_e4m3fn).flatten(-2), scale


def decode(elements: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of elements float8_e4m3fn [..., K] with scale u8 [..., K/32], as `dtype` [..., K]: exact in fp32, in
    bf16 down to 2^-133.

    Scale byte 255 and the element codes 0x7F and 0xFF decode to NaN.
    """
    return (elements.float().unflatten(-1, (-1, BLOCK)) * _scale_values(scale)).flatten(-2).to(dtype)


def round_trip(x: Tensor) -> Tensor:
    """decode(encode(x)) in x's shape and dtype, without a gradient. Raises what `encode` raises."""
    return decode(*encode(x), dtype=x.dtype)


def _scale_values(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e8m0fnu).float().unsqueeze(-1)
