"""SiTU-GLU activation."""

from tidemill.kernels.situ.ref import situ_glu, situ_glu_train

__all__ = ["situ_glu", "situ_glu_train"]
