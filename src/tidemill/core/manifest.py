"""Manifests: what a set of tensors is, provably. Format `adapter-manifest/1` and `base-manifest/1`.

A tensor's hash is SHA-256 over its little-endian C-contiguous bytes in the stored dtype. The manifest's own hash covers
its canonical JSON without the `manifest_sha256` field. `previous` chains an adapter's manifests into one history.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from tidemill.core.digests import digest_json
from tidemill.core.errors import ManifestError


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor: name, dtype (torch name without prefix, e.g. `float32`), shape, bytes, digest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterManifest:
    """One exported adapter version. `tensors` is sorted by name."""

    version: int
    base_digest: str
    config_digest: str
    created_step: int
    previous: str
    tensors: tuple[TensorEntry, ...]
    manifest_sha256: str
    schema: str = "adapter-manifest/1"

    @property
    def count(self) -> int:
        return len(self.tensors)

    @property
    def total_bytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)

    @classmethod
    def build(cls, *, version: int, base_digest: str, config_digest: str, created_step: int, previous: str,
              tensors: Iterable[TensorEntry]) -> AdapterManifest:
        """Sort, check and hash. Raises ManifestError on an empty list or a repeated name."""
        entries = tuple(sorted(tensors, key=lambda t: t.name))
        draft = cls(version=version, base_digest=base_digest, config_digest=config_digest, created_step=created_step,
                    previous=previous, tensors=entries, manifest_sha256="")
        draft.check_names()
        return dataclasses.replace(draft, manifest_sha256=draft.compute_digest())

    def check_names(self) -> None:
        """Raise ManifestError if there is no tensor or a name appears twice."""
        if not self.tensors:
            raise ManifestError(f"adapter manifest v{self.version} lists no tensors: an empty export is not a sync")
        names = [t.name for t in self.tensors]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise ManifestError(f"adapter manifest v{self.version} lists {twice[0]} twice")

    def compute_digest(self) -> str:
        """Digest over everything but `manifest_sha256`."""
        data = self.to_json()
        data.pop("manifest_sha256")
        return digest_json(data)

    def verify(self) -> None:
        """Raise ManifestError if the manifest contradicts itself."""
        self.check_names()
        if self.compute_digest() != self.manifest_sha256:
            raise ManifestError(f"adapter manifest v{self.version}: its content does not match manifest_sha256")

    def to_json(self) -> dict[str, Any]:
        data = dataclasses.asdict(self)
        data["tensors"] = [dataclasses.asdict(t) | {"shape": list(t.shape)} for t in self.tensors]
        data["count"], data["total_bytes"] = self.count, self.total_bytes
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AdapterManifest:
        """Parse and verify. Raises ManifestError naming what is missing or inconsistent."""
        try:
            raw = dict(data)
            count, total = raw.pop("count"), raw.pop("total_bytes")
            entries = cast("list[dict[str, Any]]", raw.pop("tensors"))
            tensors = tuple(_entry(e) for e in entries)
            manifest = cls(**raw, tensors=tensors)
        except (KeyError, TypeError) as e:
            raise ManifestError(f"adapter manifest is malformed: {e}") from e
        if manifest.schema != "adapter-manifest/1":
            raise ManifestError(f"adapter manifest has schema {manifest.schema!r}, expected 'adapter-manifest/1'")
        manifest.verify()
        if (count, total) != (manifest.count, manifest.total_bytes):
            raise ManifestError(f"adapter manifest v{manifest.version}: count or total_bytes do not match its list")
        return manifest


def _entry(row: dict[str, Any]) -> TensorEntry:
    fields = dict(row)
    fields["shape"] = tuple(fields["shape"])
    return TensorEntry(**fields)
