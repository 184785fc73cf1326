"""Kimi Delta Attention: gate, recurrence (engine) and chunked form (training)."""

from tidemill.kernels.kda.chunk import CHUNK, chunk
from tidemill.kernels.kda.gates import gate_train
from tidemill.kernels.kda.recurrent import gate, qk_norm, recurrence, step

__all__ = ["CHUNK", "chunk", "gate", "gate_train", "qk_norm", "recurrence", "step"]
