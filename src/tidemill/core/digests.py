"""SHA-256 over bytes, files and canonical JSON, always written `sha256:<hex>`.

Tensors are hashed by the rooms that own torch, over little-endian C-contiguous bytes of the stored dtype.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

PREFIX = "sha256:"


def digest_bytes(*parts: bytes | bytearray | memoryview) -> str:
    """Digest of the parts joined without separators."""
    h = hashlib.sha256()
    for part in parts:
        h.update(part)
    return PREFIX + h.hexdigest()


def digest_file(path: Path, *, chunk_bytes: int = 1 << 20) -> str:
    """Digest of a file's content, read in chunks."""
    h = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(chunk_bytes):
            h.update(block)
    return PREFIX + h.hexdigest()


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces; NaN and infinity are refused (ValueError)."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_json(value: Any) -> str:
    """Digest of `canonical_json(value)`."""
    return digest_bytes(canonical_json(value))
