"""Random numbers as a pure function of (seed, sequence, position): Philox4x32-10, vectorised in numpy.

Source: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
_ROUNDS = 10

U64 = NDArray[np.uint64]
Integers = Sequence[int] | U64


def philox4x32(key: U64, sequence: U64, position: U64) -> tuple[U64, U64, U64, U64]:
    """Four 32-bit words (in uint64) for each element of key, sequence, position (uint64, one shape).

    Counter words, low first: position low, position high, sequence low, sequence high; key words: low, high.
    """
    c0, c1, c2, c3 = position & _LOW, position >> _HALF, sequence & _LOW, sequence >> _HALF
    k0, k1 = key & _LOW, key >> _HALF
    for _ in range(_ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> _HALF) ^ c1 ^ k0, p1 & _LOW, (p0 >> _HALF) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + _W0) & _LOW, (k1 + _W1) & _LOW
    return c0, c1, c2, c3


def uniform(seed: Integers, sequence: Integers, position: Integers) -> NDArray[np.float64]:
    """One number in [0, 1) per element, 53 bits, from (seed, sequence, position), each taken modulo 2^64.

        >>> uniform([0], [0], [0]).round(6)
        array([0.399046])
    """
    words = philox4x32(_u64(seed), _u64(sequence), _u64(position))
    bits = ((words[0] << _HALF) | words[1]) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _u64(values: Integers) -> U64:
    if isinstance(values, np.ndarray):
        return values.astype(np.uint64)
    return np.array([v & 0xFFFFFFFFFFFFFFFF for v in values], dtype=np.uint64)
