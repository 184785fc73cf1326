"""MXFP4: blocks of 32 E2M1 values with one E8M0 scale, packed as in K3 checkpoints.

Encoding follows compressed-tensors (`mxfp4-pack-quantized`); decoding does not depend on how the scale was chosen.
Does no matrix product: weights are decoded, then multiplied.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tidemill.core.errors import InputError

BLOCK = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_MAGNITUDES, *(-m for m in _MAGNITUDES)])
_PAIRS = torch.stack([_VALUES.repeat(16), _VALUES.repeat_interleave(16)], dim=1)
"""byte -> (low nibble, high nibble)."""
_SCALES = torch.tensor([math.ldexp(1.0, e - 127) for e in range(255)] + [math.nan])


def encode(w: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise w[..., K] along its last axis; K a multiple of 32. Returns packed u8 [..., K/2] and scale u8 [...,
    K/32].

    Scale byte 127 + e − 2 with e = floor(log2 amax), one more if amax's mantissa is >= 1.75; elements to the
    nearest E2M1 value, ties to the even code, saturating at ±6. An all-zero block gets scale 127 and zero codes.
    InputError if K is not a multiple of 32 or w holds NaN or infinity.
    """
    if w.shape[-1] % BLOCK:
        raise InputError(f"MXFP4 input width = {w.shape[-1]}: expected a multiple of {BLOCK}", field="w")
    blocks = w.detach().float().unflatten(-1, (-1, BLOCK))
    amax = blocks.abs().amax(-1)
    if not bool(torch.isfinite(amax).all()):
        raise InputError("MXFP4 cannot encode NaN or infinity", field="w", remedy="Look for a diverged training step.")
    mantissa, exponent = torch.frexp(amax)
    e = exponent - 1 + (mantissa >= 0.875)
    scale = torch.where(amax > 0, (127 + e - 2).clamp(0, 254), 127).to(torch.uint8)
    x = blocks / _SCALES[scale.long()].unsqueeze(-1)
    a = x.abs()
    code = (a > 0.25).to(torch.uint8)
    for over in (a >= 0.75, a > 1.25, a >= 1.75, a > 2.5, a >= 3.5, a > 5.0):
        code += over
    code += torch.signbit(x).to(torch.uint8) * 8
    code = code.flatten(-2).unflatten(-1, (-1, 2))
    return (code[..., 0] | (code[..., 1] << 4)).contiguous(), scale.contiguous()


def decode(packed: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of packed u8 [..., K/2] with scale u8 [..., K/32], as `dtype` [..., K] (exact in fp32 and bf16).

    Byte c holds element 2c in its low nibble and 2c+1 in its high one. Scale byte 255 decodes to NaN.
    """
    values = _PAIRS[packed.long()].flatten(-2).unflatten(-1, (-1, BLOCK))
    return (values * _SCALES[scale.long()].unsqueeze(-1)).flatten(-2).to(dtype)
