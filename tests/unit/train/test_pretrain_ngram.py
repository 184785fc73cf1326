"""The n-gram baseline against the definition, written with dictionaries, and as a probability distribution."""

from __future__ import annotations

import math
import random
from collections import Counter, defaultdict

import numpy as np
import pytest

from tidemill.core.errors import ConfigError
from tidemill.train.pretrain.ngram import ByteNgram

TEXTS = [b"the cat sat on the mat; the rat sat.", b"a cat and a rat", b"th"]


def plain(texts: list[bytes], order: int, history: bytes, byte: int) -> float:
    """P(byte | history) straight from the formula."""
    p = 1 / 256
    for n in range(1, min(order, len(history) + 1) + 1):
        counts: Counter[bytes] = Counter()
        if n == order:
            counts.update(t[i : i + n] for t in texts for i in range(len(t) - n + 1))
        else:
            fronts: defaultdict[bytes, set[bytes]] = defaultdict(set)
            for t in texts:
                for i in range(len(t) - n + 1):
                    fronts[t[i : i + n]].add(t[i - 1 : i] if i else b"start")
            counts.update({gram: len(front) for gram, front in fronts.items()})
        once, twice = (sum(c == k for c in counts.values()) for k in (1, 2))
        discount = once / (once + 2 * twice) if once else 0.0
        context = history[len(history) - n + 1 :]
        after = {gram: c for gram, c in counts.items() if gram[:-1] == context}
        total = sum(after.values())
        if total:
            p = max(after.get(context + bytes([byte]), 0) - discount, 0) / total + discount * len(after) / total * p
    return p


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_it_follows_the_formula(order: int) -> None:
    model = ByteNgram(TEXTS, order)
    text = b"the bat sat on a cat; xyz the rat"
    found = model.log2_probabilities(text)
    wanted = [math.log2(plain(TEXTS, order, text[:i], text[i])) for i in range(len(text))]
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    assert model.bits_per_byte([text]) == pytest.approx(-sum(wanted) / len(text))


def test_probabilities_of_all_bytes_add_up_to_one() -> None:
    model = ByteNgram(TEXTS, 4)
    for history in (b"", b"t", b"the ", b"zzz", b" ca"):
        total = sum(2 ** model.log2_probabilities(history + bytes([b]))[-1] for b in range(256))
        assert total == pytest.approx(1.0)


def test_more_history_helps_on_text_and_nothing_helps_on_noise() -> None:
    rng = random.Random(1)
    words = [b"alpha", b"beta", b"gamma", b"delta"]
    texts = [b" ".join(rng.choice(words) for _ in range(400)) for _ in range(2)]
    bits = [ByteNgram(texts[:1], order).bits_per_byte(texts[1:]) for order in (1, 2, 4)]
    assert bits == sorted(bits, reverse=True)
    assert bits[-1] < 0.6
    noise = [rng.randbytes(4000) for _ in range(2)]
    assert ByteNgram(noise[:1], 3).bits_per_byte(noise[1:]) > 7.9


def test_bad_orders_and_too_little_text_are_refused() -> None:
    with pytest.raises(ConfigError, match="order"):
        ByteNgram(TEXTS, 9)
    with pytest.raises(ConfigError, match="texts"):
        ByteNgram([b"ab"], 3)
