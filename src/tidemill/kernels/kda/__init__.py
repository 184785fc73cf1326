"""Kimi Delta Attention: gate, recurrence (engine), chunked form (training), segments (context parallelism)."""

from tidemill.kernels.kda.chunk import CHUNK, chunk
from tidemill.kernels.kda.gates import gate_train
from tidemill.kernels.kda.recurrent import gate, qk_norm, recurrence, step
from tidemill.kernels.kda.segments import Segment, Transition, compose, segment

__all__ = [
    "CHUNK", "Segment", "Transition", "chunk", "compose", "gate", "gate_train", "qk_norm", "recurrence", "segment",
    "step",
]
