"""How K3 cuts text into pieces before merging bytes: each piece is merged on its own.

One regular expression, written so that the `regex` engine of tiktoken and Oniguruma of the `tokenizers` library read it
alike. Alternatives are tried in this order: Han; a word, lower case at its end, with one foreign sign in front and an
English contraction behind; a word of capitals, likewise; one to three digits; signs with one space in front and line
breaks behind; white space up to a line break; white space up to the last before a word; other white space.
Source of the alternatives: the K3 tokenizer as described in its technical report.
"""

from __future__ import annotations

_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# Letters spelled out instead of a case-insensitive group: engines fold case differently. U+017F folds to s.
_CONTRACTION = "(?:'(?:[sS\u017ftTmMdD]|[rR][eE]|[vV][eE]|[lL][lL]))?"
_DIGITS = r"\p{N}{1,3}"

K3_PATTERN = "|".join((
    r"\p{Han}+",
    f"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTION}",
    f"{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTION}",
    _DIGITS,
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
))
"""Matches every character of every text: nothing is left between pieces."""

LEARNING_PATTERN = K3_PATTERN.replace(_DIGITS, r"\p{N}")
"""The same with single digits: what is learnt from pieces of this pattern has no token of several digits."""

CLASSES = (r"\p{Han}", _UPPER, _LOWER, r"\p{L}", r"\p{N}", r"\s")
"""The character classes the pattern is made of. They depend on the Unicode version an engine knows."""
