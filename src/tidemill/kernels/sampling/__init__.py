"""Counter-based random numbers and per-row sampling."""

from tidemill.kernels.sampling.philox import philox4x32, uniform
from tidemill.kernels.sampling.ref import Sampled, sample

__all__ = ["Sampled", "philox4x32", "sample", "uniform"]
