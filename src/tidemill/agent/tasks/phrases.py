"""Short phrases of words, letters without meaning, and numbers: what generated requests talk about.

Much of it cannot be guessed, so that a model has to copy instead.
"""

from __future__ import annotations

import random

NOUNS = (
    "apple", "bridge", "candle", "desert", "engine", "forest", "garden", "hammer", "island", "jacket", "kettle",
    "ladder", "market", "needle", "orange", "pencil", "quartz", "river", "saddle", "tunnel", "umbrella", "violin",
    "window", "yellow", "zebra", "north", "small", "quick", "seven", "paper", "stone", "light",
)
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def phrase(rng: random.Random) -> str:
    """One to four words, numbers or runs of letters."""
    return " ".join(word(rng) for _ in range(rng.randint(1, 4)))


def word(rng: random.Random) -> str:
    """A noun, letters, or a number."""
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(NOUNS)
    if kind < 0.75:
        return "".join(rng.choice(_LETTERS) for _ in range(rng.randint(2, 6)))
    return str(number(rng))


def number(rng: random.Random) -> int:
    """Of one to four digits."""
    return rng.randrange(10 ** rng.randint(1, 4))
