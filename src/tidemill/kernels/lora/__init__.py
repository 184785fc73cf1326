"""Low-rank adapters."""

from tidemill.kernels.lora.ref import delta, pad_rank

__all__ = ["delta", "pad_rank"]
