"""Block attention residual mixture."""

from tidemill.kernels.attn_res.ref import mix
from tidemill.kernels.attn_res.train import mix_train

__all__ = ["mix", "mix_train"]
