"""Block attention residual mixture."""

from tidemill.kernels.attn_res.ref import mix

__all__ = ["mix"]
