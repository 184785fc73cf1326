"""Normalisation ops."""

from tidemill.kernels.norm.ref import gated_rms_norm, l2_norm, rms_norm
from tidemill.kernels.norm.train import gated_rms_norm_train, l2_norm_train, rms_norm_train

__all__ = ["gated_rms_norm", "gated_rms_norm_train", "l2_norm", "l2_norm_train", "rms_norm", "rms_norm_train"]
