"""A byte n-gram model with interpolated Kneser-Ney smoothing: what a language model must beat to have learned anything.

    P_n(w | h) = max(c(hw) − D_n, 0) / c(h·) + D_n N(h·) / c(h·) · P_{n−1}(w | h')        P_0 = 1/256

h is the n − 1 bytes before w, h' one byte less, N(h·) the number of different bytes seen after h. Counts are those of
the text at the highest order, else the number of different bytes in front (continuation counts); D_n = n₁ / (n₁ + 2 n₂)
with n₁, n₂ the n-grams counted once and twice. After an unseen h, P_n is P_{n−1}. Source: Chen and Goodman 1998.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tidemill.core.config import require

MAX_ORDER = 8
"""An n-gram is kept as one 64-bit number."""

Keys = NDArray[np.uint64]


@dataclass(frozen=True)
class _Order:
    """n-grams of one length with their counts, and the contexts they begin with; both sorted."""

    keys: Keys
    counts: NDArray[np.float64]
    contexts: Keys
    totals: NDArray[np.float64]
    kinds: NDArray[np.float64]
    discount: float

    @classmethod
    def of(cls, keys: Keys, counts: NDArray[np.int64]) -> _Order:
        contexts, first, kinds = np.unique(keys >> np.uint64(8), return_index=True, return_counts=True)
        once, twice = int((counts == 1).sum()), int((counts == 2).sum())
        discount = once / (once + 2 * twice) if once else 0.0
        return cls(keys, counts.astype(np.float64), contexts, np.add.reduceat(counts.astype(np.float64), first),
                   kinds.astype(np.float64), discount)

    def update(self, grams: Keys, p: NDArray[np.float64]) -> NDArray[np.float64]:
        """P_n of n-grams whose P_{n-1} is `p`."""
        count = _looked_up(self.keys, self.counts, grams)
        total = _looked_up(self.contexts, self.totals, grams >> np.uint64(8))
        kinds = _looked_up(self.contexts, self.kinds, grams >> np.uint64(8))
        seen = total > 0
        total = np.where(seen, total, 1.0)
        return np.where(seen, np.maximum(count - self.discount, 0.0) / total + self.discount * kinds / total * p, p)


class ByteNgram:
    """Trained on texts; `order` bytes at a time, the predicted one included."""

    def __init__(self, texts: Iterable[bytes], order: int) -> None:
        require(1 <= order <= MAX_ORDER, field="order", value=order, expected=f"1 to {MAX_ORDER}")
        pieces = [np.frombuffer(text, dtype=np.uint8) for text in texts]
        grams = [_grams(piece, order) for piece in pieces if len(piece) >= order]
        require(bool(grams), field="texts", value=len(pieces), expected=f"a text of at least {order} bytes")
        keys, counts = np.unique(np.concatenate(grams), return_counts=True)
        self._orders = [_Order.of(keys, counts)]
        for n in range(order - 1, 0, -1):
            longer, starts = keys, [_grams(piece[:n], n) for piece in pieces if len(piece) >= n]
            # What begins a text has no byte in front; it is counted as if one of its own stood there.
            ends = np.concatenate([longer & np.uint64((1 << (8 * n)) - 1), np.unique(np.concatenate(starts))])
            keys, counts = np.unique(ends, return_counts=True)
            self._orders.insert(0, _Order.of(keys, counts))

    @property
    def order(self) -> int:
        return len(self._orders)

    def log2_probabilities(self, text: bytes) -> NDArray[np.float64]:
        """log2 P of each byte after the bytes before it (fewer at the start of the text)."""
        data = np.frombuffer(text, dtype=np.uint8)
        p = np.full(len(data), 1.0 / 256.0)
        for n, model in enumerate(self._orders, 1):
            if len(data) >= n:
                p[n - 1 :] = model.update(_grams(data, n), p[n - 1 :])
        return np.log2(p)

    def bits_per_byte(self, texts: Iterable[bytes]) -> float:
        """Mean over all bytes of all texts."""
        bits = [-self.log2_probabilities(text) for text in texts]
        return float(np.concatenate(bits).mean())


def _grams(data: NDArray[np.uint8], n: int) -> Keys:
    """Every n bytes in a row as a number, the first byte the most significant."""
    keys = np.zeros(len(data) - n + 1, dtype=np.uint64)
    for i in range(n):
        keys = (keys << np.uint64(8)) | data[i : len(data) - n + 1 + i].astype(np.uint64)
    return keys


def _looked_up(keys: Keys, values: NDArray[np.float64], wanted: Keys) -> NDArray[np.float64]:
    """values of `wanted`; 0 where there is none."""
    place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[place] == wanted, values[place], 0.0)
