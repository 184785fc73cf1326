"""Offset-independent sigmoid, SiLU and softplus; the dtype of reductions."""

from tidemill.kernels.pointwise.ref import sigmoid, silu, softplus, wide

__all__ = ["sigmoid", "silu", "softplus", "wide"]
