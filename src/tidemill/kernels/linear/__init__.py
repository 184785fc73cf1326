"""Row-invariant linear maps; see README.md for the rules."""

from tidemill.kernels.linear.ref import (
    MIN_COLUMNS,
    ROW_TILE,
    linear,
    pad_columns,
    pad_rows,
    padded_rows,
)

__all__ = ["MIN_COLUMNS", "ROW_TILE", "linear", "pad_columns", "pad_rows", "padded_rows"]
