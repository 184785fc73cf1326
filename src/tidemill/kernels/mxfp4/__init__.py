"""MXFP4 encoding and decoding."""

from tidemill.kernels.mxfp4.ref import BLOCK, decode, encode

__all__ = ["BLOCK", "decode", "encode"]
