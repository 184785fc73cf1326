"""SiTU-GLU activation."""

from tidemill.kernels.situ.act import GluAct
from tidemill.kernels.situ.ref import situ_glu, situ_glu_train

__all__ = ["GluAct", "situ_glu", "situ_glu_train"]
