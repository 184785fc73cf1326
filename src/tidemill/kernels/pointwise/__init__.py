"""Offset-independent sigmoid, SiLU and softplus."""

from tidemill.kernels.pointwise.ref import sigmoid, silu, softplus

__all__ = ["sigmoid", "silu", "softplus"]
