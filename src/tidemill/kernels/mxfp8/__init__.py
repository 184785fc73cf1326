"""MXFP8 encoding and decoding."""

from tidemill.kernels.mxfp8.ref import BLOCK, decode, encode, round_trip

__all__ = ["BLOCK", "decode", "encode", "round_trip"]
