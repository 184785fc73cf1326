"""Identifiers that sort by creation time: `<prefix>-<time48><random50>` in Crockford base32 (18 characters after
the prefix), lower case, safe in file names, host names and SQL."""

from __future__ import annotations

import secrets
import time

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def new_id(prefix: str, *, now_ms: int | None = None) -> str:
    """Return a new id; two ids made in different milliseconds sort by time as strings."""
    ms = time.time_ns() // 1_000_000 if now_ms is None else now_ms
    return f"{prefix}-{_base32(ms, 10)}{_base32(secrets.randbits(40), 8)}"


def _base32(value: int, width: int) -> str:
    digits: list[str] = []
    for _ in range(width):
        digits.append(_ALPHABET[value & 31])
        value >>= 5
    return "".join(reversed(digits))
