"""Documents packed into one row, and their cutting into blocks of equal size."""

from tidemill.kernels.packing.blocks import Blocks, cut, document_bounds

__all__ = ["Blocks", "cut", "document_bounds"]
