"""Normalisation ops."""

from tidemill.kernels.norm.ref import gated_rms_norm, l2_norm, rms_norm

__all__ = ["gated_rms_norm", "l2_norm", "rms_norm"]
