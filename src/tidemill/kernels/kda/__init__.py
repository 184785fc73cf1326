"""Kimi Delta Attention: gate, recurrence (engine) and chunked form (training)."""

from tidemill.kernels.kda.recurrent import gate, qk_norm, recurrence, step

__all__ = ["gate", "qk_norm", "recurrence", "step"]
